"""The newcomer's first command, as the README gives it: it must end with its one line, and the model must have learnt.

It makes runs/quickstart where that is missing. One preset and one seed; the others run for two steps in
test_presets.py, and to their end in tools/sweep_quickstart.py. Says nothing about other tasks.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_quickstart import SECONDS

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"quickstart: accuracy (?P<before>0\.\d\d) -> (?P<after>[01]\.\d\d) on (?P<problems>\d+) held-out problems, "
    r"(?P<steps>\d+) steps, \d+ s, run (?P<run>\S+)"
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_learns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["bash", "launch/quickstart.sh", f"run_dir={run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = LINE.fullmatch(done.stdout.splitlines()[-1])
    assert line is not None, done.stdout[-500:]
    assert (int(line["problems"]), int(line["steps"]), line["run"]) == (512, 60, str(run))
    assert float(line["after"]) >= 0.90
    assert float(line["after"]) - float(line["before"]) >= 0.40
    assert (run / "export" / "model.safetensors").is_file()
    assert SECONDS.search(done.stdout), "the sweep would not find the line"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_start_of_mixed_lengths_foretells_the_outcome_by_the_length(tmp_path: Path) -> None:
    out = tmp_path / "mixed"
    command = [sys.executable, "tools/make_quickstart.py", "--out", str(out), "--variant", "mixed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    by_length = json.loads((out / "quickstart.json").read_text())["held_out"]["sampled"]
    assert by_length["3 digits"] > by_length["7 digits"] + 0.3
