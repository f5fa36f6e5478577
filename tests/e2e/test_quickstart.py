"""The newcomer's first command, as the README gives it: it must end with its one line, and the model must have learnt.

It makes runs/quickstart where that is missing. One seed; says nothing about other tasks.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"quickstart: accuracy (?P<before>0\.\d\d) -> (?P<after>[01]\.\d\d) on (?P<problems>\d+) held-out problems, "
    r"(?P<steps>\d+) steps, \d+ s, run (?P<run>\S+)"
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 60), ("ppo", 40)])
def test_the_quickstart_learns(tmp_path: Path, algorithm: str, steps: int) -> None:
    run = tmp_path / "run"
    command = ["bash", "launch/quickstart.sh", algorithm, f"run_dir={run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = LINE.fullmatch(done.stdout.splitlines()[-1])
    assert line is not None, done.stdout[-500:]
    assert (int(line["problems"]), int(line["steps"]), line["run"]) == (512, steps, str(run))
    assert float(line["after"]) >= 0.90
    assert float(line["after"]) - float(line["before"]) >= 0.40
    assert (run / "export" / "model.safetensors").is_file()
