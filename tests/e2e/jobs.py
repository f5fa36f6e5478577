"""`torchrun launch/train.py`, run in a workspace as a user would, watched, and ended with all that it started.

Every process of a job inherits a mark in its environment, by which the job finds all of them, engines and reward
workers included, and by which a test knows that none is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).with_name("torchrun")
JOB_TIMEOUT_S = 480.0
GONE_WITHIN_S = 10.0
MARK = "RLMEGATRON_TEST_JOB"


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    output: str
    seconds: float
    ended_at: float
    """Clock time."""

    @property
    def ours(self) -> str:
        """What was printed before torchrun's summary."""
        return self.output.partition("torch/distributed/elastic/")[0]

    def report(self) -> str:
        """The one framed report of the ranks; fails where there is none or several."""
        frame = "=" * 100
        parts = self.output.split(f"{frame}\n")
        assert len(parts) == 3, f"expected one report, found {len(parts) // 2}:\n{self.output}"
        return parts[1]


class Job:
    """`torchrun launch/train.py`, started in the workspace; `finish` waits for it, `stop` ends whatever is left.

    ranks: 0 leaves torchrun out.
    """

    def __init__(self, directory: Path, arguments: list[str], *, ranks: int) -> None:
        self._mark = uuid.uuid4().hex
        self._log = directory / f"output_{self._mark}.txt"
        self._started = time.monotonic()
        environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        launcher = [TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)] if ranks else [sys.executable]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*launcher, ROOT / "launch" / "train.py", *arguments],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, timeout_s: float = JOB_TIMEOUT_S) -> Outcome:
        """Wait for the end, and demand that no process of the job outlives it by more than a moment."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            pytest.fail(f"the job did not end within {timeout_s:.0f} s:\n{self.output()}")
        ended_at, seconds = time.time(), time.monotonic() - self._started
        left = self._wait_until_gone()
        self.stop()
        assert not left, f"processes outlived the job: {left}\n{self.output()}"
        return Outcome(code, self.output(), seconds, ended_at)

    def output(self) -> str:
        """What was printed so far, by torchrun and all ranks."""
        return self._log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The value of `condition` once it is true; fails when the job ends before or it takes too long."""
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while not (value := condition()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"waited in vain for {what}:\n{self.output()}")
            time.sleep(0.05)
        return value

    def processes(self) -> dict[int, list[str]]:
        """Command lines of every process of the job by process id."""
        wanted, found = f"{MARK}={self._mark}".encode(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue  # it has just ended, or is not ours
        return found

    def signal_rank(self, number: int, signum: signal.Signals) -> None:
        """Send a signal to one rank's process."""
        scripts = [pid for pid, words in self.processes().items() if str(ROOT / "launch" / "train.py") in words]
        (rank,) = [pid for pid in scripts if _environment_of(pid).get("RANK") == str(number)]
        os.kill(rank, signum)

    def engines(self) -> list[int]:
        """Process ids of the engines' servers, each the leader of its group."""
        servers = [pid for pid, words in self.processes().items() if "rlmegatron.rollout.serve" in words]
        return sorted(pid for pid in servers if os.getpgid(pid) == pid)

    def stop(self) -> None:
        """Kill every process of the job; safe after its end."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._process.wait()

    def _wait_until_gone(self) -> dict[int, list[str]]:
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


def _environment_of(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@dataclass(frozen=True)
class Workspace:
    """A directory with model/, train.jsonl, test.jsonl, run.yaml and the user's modules."""

    path: Path

    def start(self, *overrides: str, ranks: int = 2) -> Job:
        """Start `torchrun --nproc-per-node ranks launch/train.py --config run.yaml overrides` here."""
        return Job(self.path, ["--config", "run.yaml", *overrides], ranks=ranks)

    def run(self, *overrides: str, ranks: int = 2) -> Outcome:
        """The same, to its end."""
        job = self.start(*overrides, ranks=ranks)
        try:
            return job.finish()
        finally:
            job.stop()

    def train(self, name: str, *overrides: str, ranks: int = 2) -> Path:
        """Run to a good end; the run directory."""
        outcome = self.run(f"name={name}", *overrides, ranks=ranks)
        assert outcome.code == 0, outcome.output
        return self.path / "runs" / name

    def write_rows(self, name: str, rows: list[Any]) -> str:
        """Write a JSONL file; strings are written as they are. Returns the override that trains on it."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.path / name).write_text("".join(line + "\n" for line in lines))
        return f"data.train=[{{path: {name}}}]"

    def copy_model(self, name: str, **config: Any) -> Path:
        """A copy of the model whose config.json has other values."""
        directory = self.path / name
        shutil.copytree(self.path / "model", directory)
        changed = {**json.loads((directory / "config.json").read_text()), **config}
        (directory / "config.json").write_text(json.dumps(changed))
        return directory


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    """The row of every step, evaluations merged into it."""
    rows: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return rows


def has_metrics(run: Path) -> bool:
    """Whether a step is done."""
    path = run / "metrics.jsonl"
    return path.exists() and bool(path.read_text())


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The answers of one step."""
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
