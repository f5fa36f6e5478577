"""A workspace with a tiny random model, and `torchrun launch/train.py` run in it as a user would, to its end.

Every process of a job inherits a mark in its environment, by which the job finds all of them, engines and reward
workers included, and by which a test knows that none is left.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config import yaml_text

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).with_name("torchrun")
JOB_TIMEOUT_S = 240.0
GONE_WITHIN_S = 10.0
MARK = "RLMEGATRON_TEST_JOB"

USER_PIECES = '''\
"""A user's reward and losses, found in the working directory."""

import json
import os
import time
from pathlib import Path

import torch

from rlmegatron.algorithms.policy_loss import ppo_clip


def note_fault():
    Path("fault").write_text(str(time.time()))


def small_digits(answer):
    return sum(letter < "5" for letter in answer.response) / 6


def constant(answer):
    return 0.25


def raises_on_one(answer):
    if answer.row["number"] == 5:
        note_fault()
        raise RuntimeError("the fifth row is judged by nobody")
    return 0.0


def raises_on_rank_1(*, logp, old_logp, advantages, weights, clip_low, clip_high):
    if os.environ["RANK"] == "1":
        note_fault()
        raise RuntimeError("rank 1 does not like this batch")
    return ppo_clip(
        logp=logp, old_logp=old_logp, advantages=advantages, weights=weights, clip_low=clip_low, clip_high=clip_high
    )


def recording(*, logp, old_logp, advantages, weights, mask, cu_seqlens, clip_low, clip_high):
    """The usual loss; the log-probabilities from before the update go to a file per rank."""
    with open(f"old_logp_rank{os.environ['RANK']}.jsonl", "a") as file:
        for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
            counted = mask[start:stop]
            file.write(json.dumps(old_logp[start:stop][counted].tolist()) + "\\n")
    return ppo_clip(
        logp=logp, old_logp=old_logp, advantages=advantages, weights=weights, clip_low=clip_low, clip_high=clip_high
    )
'''


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    output: str
    seconds: float
    ended_at: float
    """Clock time."""

    def report(self) -> str:
        """The one framed report; fails where there is none or several."""
        frame = "=" * 100
        parts = self.output.split(f"{frame}\n")
        assert len(parts) == 3, f"expected one report, found {len(parts) // 2}:\n{self.output}"
        return parts[1]


class Job:
    """`torchrun launch/train.py`, started in the workspace; `finish` waits for it, `stop` ends whatever is left."""

    def __init__(self, directory: Path, arguments: list[str], *, ranks: int) -> None:
        self._mark = uuid.uuid4().hex
        self._log = directory / f"output_{self._mark}.txt"
        self._started = time.monotonic()
        environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), ROOT / "launch" / "train.py", *arguments],
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

    def rank(self, number: int) -> int:
        """Process id of a rank."""
        ranks = [pid for pid, words in self.processes().items() if _environment_of(pid).get("RANK") == str(number)]
        return min(ranks)  # those that a rank starts come later

    def engines(self) -> list[int]:
        """Process ids of the engines' servers, each the leader of its group."""
        servers = [pid for pid, words in self.processes().items() if "rlmegatron.rollout.serve" in words]
        return sorted(pid for pid in servers if os.getpgid(pid) == pid)

    def stop(self) -> None:
        """Kill every process of the job; safe after its end."""
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
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
    """A directory with model/, train.jsonl, test.jsonl, run.yaml and user_pieces.py."""

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


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The answers of one step."""
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


CONFIG: dict[str, Any] = {
    "name": "unnamed",
    "model": {"path": "model", "dtype": "fp32"},
    "data": {"train": [{"path": "train.jsonl"}], "max_prompt_tokens": 16},
    "actor": {"optimizer": {"lr": 1e-3}},
    "rollout": {
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "context_length": 32,
        "max_total_tokens": 4096,
        "mem_fraction": 0.3,
    },
    "reward": {"name": "user_pieces:small_digits", "workers": 1},
    "train": {"steps": 3, "mini_batches": 2},
    "eval": {"sets": {"test": "test.jsonl"}, "at_start": False},
}


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    directory = tmp_path_factory.mktemp("workspace")
    _write_model(directory / "model")
    from quickstart import problems

    rng = random.Random(7)
    drawn = [problems.row(digits) for digits in problems.draw_distinct(rng, problems.VARIANTS["sort5"], 80, held_out=False)]
    rows = [{**row, "number": number} for number, row in enumerate(drawn)]
    made = Workspace(directory)
    made.write_rows("train.jsonl", list(rows[:64]))
    made.write_rows("test.jsonl", list(rows[64:]))
    (directory / "user_pieces.py").write_text(USER_PIECES)
    (directory / "run.yaml").write_text(yaml_text.dump(CONFIG))
    return made


@pytest.fixture
def start(workspace: Workspace) -> Iterator[Callable[..., Job]]:
    """`workspace.start`, for tests that act while the job runs; whatever they leave is ended."""
    jobs: list[Job] = []

    def begin(*overrides: str, ranks: int = 2) -> Job:
        jobs.append(workspace.start(*overrides, ranks=ranks))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.stop()


def _write_model(directory: Path) -> None:
    """The quickstart's model with random weights, larger than usual, so that a wrong weight shows in a log-probability."""
    from rlmegatron.platform.torchvision_ops import install_torchvision_hook

    install_torchvision_hook()
    import torch
    from quickstart import tiny_model
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(tiny_model.model_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.generation_config = tiny_model.generation_config()
    model.save_pretrained(directory)
    tiny_model.build_tokenizer().save_pretrained(directory)
