"""A wrong command line of a script under launch/ is one line and exit code 2, before anything is installed.

launch/test.sh must not be called like this: it installs first, and hands what it does not know to pytest.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.mark.parametrize("script", ["environment.sh", "quickstart.sh"])
def test_an_unknown_option_is_refused_with_exit_code_2(script: str) -> None:
    done = subprocess.run(["bash", LAUNCH / script, "--foo"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--foo'" in done.stderr and done.stderr.count("\n") == 1
