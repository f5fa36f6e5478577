"""A wrong command line of a script under launch/ is one line and exit code 2, before anything is installed.

launch/test.sh must not be called like this: it installs first, and hands what it does not know to pytest.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", ["environment.sh", "quickstart.sh"])
def test_an_unknown_option_is_refused_with_exit_code_2(script: str) -> None:
    done = subprocess.run(["bash", LAUNCH / script, "--foo"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--foo'" in done.stderr and done.stderr.count("\n") == 1


def test_a_seed_with_a_leading_zero_is_a_decimal_number(tmp_path: Path) -> None:
    """The script in a tree of stand-ins, whose Python only writes down what it is called with."""
    for folder in ("launch", "yaml_configs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(LAUNCH / "quickstart.sh", tmp_path / "launch")
    (tmp_path / "launch" / "environment.sh").write_text("")
    (tmp_path / "yaml_configs" / "quickstart_grpo.yaml").write_text("\n# a preset\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@" >> calls.txt\n')
    python.chmod(0o755)
    command = ["bash", tmp_path / "launch" / "quickstart.sh", "--seed", "08"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    made, checked, *_ = (tmp_path / "calls.txt").read_text().splitlines()
    assert made == "tools/make_quickstart.py --out runs/quickstart_seed8 --seed 8 --variant sort5"
    assert " seed=8 " in checked
