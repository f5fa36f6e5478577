"""The judge against rewards that raise, hang, crash or return nonsense."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.rewards.api import RewardError
from rlmegatron.rewards.judge import Judge, judge
from rlmegatron.rewards.table import Reward, resolve
from rlmegatron.types import Prompt, Sample, SampleGroup

MODULE = """
import asyncio, os, subprocess, sys, time

def length(answer):
    print("a reward may print")
    return {"reward": len(answer.response), "process": os.getpid()}

async def slow_length(answer):
    await asyncio.sleep(0.01)
    return len(answer.response)

def by_text(answer):
    what, _, argument = answer.response.strip().partition(":")
    if what == "raise":
        raise KeyError(argument)
    if what == "hang":
        while True:
            pass
    if what == "sleep":
        time.sleep(float(argument))
    if what == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(613)"]).wait()
    if what == "crash":
        os._exit(3)
    if what == "abort":
        os.abort()
    if what == "exit":
        sys.exit("bye")
    if what == "nan":
        return float("nan")
    return 1.0
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_judge_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_judge_rewards", raising=False)
    return "my_judge_rewards"


def group(responses: list[str], *, prompt_id: int = 0, **row: Any) -> SampleGroup:
    prompt = Prompt(prompt_id, (1,), "p", {"answer": "good", **row}, f"data/train.jsonl line {prompt_id + 1}")
    samples = [
        Sample(prompt_id, index, (5, 6), (-1.0, -1.0), (0, 0), "stop", response)
        for index, response in enumerate(responses)
    ]
    return SampleGroup(prompt, tuple(samples))


def rewards_of(groups: list[SampleGroup]) -> list[list[float | None]]:
    return [[sample.reward for sample in one.samples] for one in groups]


def run(reward: Reward, groups: list[SampleGroup], **options: Any) -> list[SampleGroup]:
    defaults: dict[str, Any] = {"timeout_s": 20.0, "workers": 2, "on_error": "stop", "error_score": 0.0}
    return judge(reward, groups, **{**defaults, **options})


def test_rewards_reach_their_own_samples_and_nothing_else_changes() -> None:
    groups = [group(["good", "bad"]), group([], prompt_id=1), group(["bad", "good", "good"], prompt_id=2)]
    judged = run(resolve("exact_answer", {}), groups)
    assert rewards_of(judged) == [[1.0, 0.0], [], [0.0, 1.0, 1.0]]
    assert judged[2].samples[1].text == "good" and judged[2].prompt is groups[2].prompt
    assert groups[0].samples[0].reward is None


def test_worker_processes_give_every_sample_its_own_reward(user_module: str) -> None:
    groups = [group(["x" * (8 * i + j) for j in range(8)], prompt_id=i) for i in range(32)]
    judged = run(resolve(f"{user_module}:length", {}), groups)
    assert rewards_of(judged) == [[8 * i + j for j in range(8)] for i in range(32)]
    processes = {sample.reward_parts["process"] for one in judged for sample in one.samples}
    assert os.getpid() not in processes and 1 <= len(processes) <= 2


def test_asynchronous_rewards_are_awaited(user_module: str) -> None:
    assert rewards_of(run(resolve(f"{user_module}:slow_length", {}), [group(["a", "bb"])])) == [[1.0, 2.0]]


def test_no_groups_give_no_groups(user_module: str) -> None:
    assert run(resolve(f"{user_module}:length", {}), []) == []
    assert run(resolve("exact_answer", {}), []) == []


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise:abc", "KeyError: 'abc"),
        ("hang", "timed out after 0.5 s"),
        ("sleep:60", "timed out after 0.5 s"),
        ("crash", r"the reward's process ended \(exit status 3\)"),
        ("abort", r"the reward's process ended \(signal SIGABRT\)"),
        ("exit", "SystemExit: bye"),
        ("nan", "the reward is nan, must be a finite number"),
    ],
)
def test_a_failing_sample_is_named(user_module: str, response: str, reason: str) -> None:
    groups = [group(["fine"] * 4, prompt_id=6), group(["fine", response + " " * 300, "fine"], prompt_id=7)]
    began = time.monotonic()
    where = r"prompt 7 \(data/train.jsonl line 8\), sample 1: "
    with pytest.raises(RewardError, match=rf"reward {user_module}:by_text, {where}.*{reason}") as caught:
        run(resolve(f"{user_module}:by_text", {}), groups, timeout_s=0.5)
    assert time.monotonic() - began < 30
    quoted = repr((response + " " * 300)[:200])
    assert f"(2 tokens, finish reason stop): {quoted}..." in str(caught.value)


def test_an_exception_shows_where_in_the_users_code_it_was_raised(user_module: str) -> None:
    with pytest.raises(RewardError, match="KeyError: 'abc'") as caught:
        run(resolve(f"{user_module}:by_text", {}), [group(["raise:abc"])])
    assert 'my_judge_rewards.py", line 15, in by_text\n    raise KeyError(argument)' in str(caught.value)
    assert "worker.py" not in str(caught.value)


def test_a_verifiers_own_error_is_one_message_without_a_traceback() -> None:
    with pytest.raises(RewardError) as caught:
        run(resolve("exact_answer", {"answer_key": "label"}), [group(["x"], prompt_id=3)])
    assert str(caught.value) == (
        "reward exact_answer, prompt 3 (data/train.jsonl line 4), sample 0: ColumnError: the row has no column "
        "'label'; it has 'answer' (set reward.args.answer_key)\n  response (2 tokens, finish reason stop): 'x'"
    )


def test_failures_are_scored_and_counted_when_asked_and_the_rest_is_judged(user_module: str) -> None:
    responses = ["a", "hang", "b", "crash", "c", "raise:x", "d", "nan", *"efghijkl", "hang", "m"]
    with Judge(
        resolve(f"{user_module}:by_text", {}), timeout_s=0.5, workers=2, on_error="score", error_score=-2.0
    ) as keeper:
        for _ in range(2):
            (judged,) = keeper.judge([group(responses)])
            expected = [1.0 if len(response) == 1 else -2.0 for response in responses]
            assert [sample.reward for sample in judged.samples] == expected
            errors = [sample.reward_parts["error"] for sample in judged.samples]
            assert errors == [float(reward == -2.0) for reward in expected]


def test_a_judge_goes_on_after_a_stop(user_module: str) -> None:
    reward = resolve(f"{user_module}:by_text", {})
    with Judge(reward, timeout_s=0.5, workers=2, on_error="stop", error_score=0.0) as keeper:
        with pytest.raises(RewardError, match="timed out"):
            keeper.judge([group(["a", "hang", *"bcdefgh"])])
        assert rewards_of(keeper.judge([group(["a", "b"])])) == [[1.0, 1.0]]


def test_a_catastrophic_pattern_times_out() -> None:
    reward = resolve("regex", {"pattern": "(a+)+b"})
    groups = [group(["aab", "a" * 60, "xx"])]
    assert rewards_of(run(reward, groups, timeout_s=0.5, on_error="score", error_score=-1.0)) == [[1.0, -1.0, 0.0]]


def test_what_a_hanging_reward_started_ends_with_it(user_module: str) -> None:
    reward = resolve(f"{user_module}:by_text", {})
    assert rewards_of(run(reward, [group(["child"])], timeout_s=1.0, on_error="score", error_score=-1.0)) == [[-1.0]]
    deadline = time.monotonic() + 30
    while any(map(_is_sleeper, filter(str.isdigit, os.listdir("/proc")))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() < deadline


def test_closing_ends_the_workers(user_module: str) -> None:
    reward = resolve(f"{user_module}:length", {})
    with Judge(reward, timeout_s=5.0, workers=2, on_error="stop", error_score=0.0) as keeper:
        (judged,) = keeper.judge([group(["a", "b", "c", "d"])])
        processes = {int(sample.reward_parts["process"]) for sample in judged.samples}
        assert all(os.path.exists(f"/proc/{process}") for process in processes)
    assert not any(os.path.exists(f"/proc/{process}") for process in processes)


def test_workers_end_with_a_judging_process_that_is_killed(user_module: str, tmp_path: Path) -> None:
    script = f"""
import os, signal
from rlmegatron.rewards.judge import Judge
from rlmegatron.rewards.table import resolve
from rlmegatron.types import Prompt, Sample, SampleGroup
keeper = Judge(resolve("{user_module}:length", {{}}), timeout_s=5.0, workers=1, on_error="stop", error_score=0.0)
sample = Sample(0, 0, (1,), (0.0,), (0,), "stop", "x")
(judged,) = keeper.judge([SampleGroup(Prompt(0, (1,), "p", {{}}, "f line 1"), (sample,))])
print("worker", int(judged.samples[0].reward_parts["process"]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "killed.py").write_text(script)  # no __main__ guard: a worker must not run this file again
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "killed.py"],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("worker ")]
    assert len(lines) == 1, result.stderr
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{lines[0].split()[1]}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_a_module_that_breaks_in_the_worker_is_an_error_even_when_failures_are_scored(
    user_module: str, tmp_path: Path
) -> None:
    reward = resolve(f"{user_module}:length", {})
    (tmp_path / f"{user_module}.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(RewardError, match="could not start in its worker process: .*RuntimeError: no licence"):
        run(reward, [group(["a"])], on_error="score")


def test_a_judge_keeps_its_worker_from_call_to_call(user_module: str) -> None:
    reward = resolve(f"{user_module}:length", {})
    with Judge(reward, timeout_s=5.0, workers=1, on_error="stop", error_score=0.0) as keeper:
        (judged,) = keeper.judge([group(["a", "b"])])
        (again,) = keeper.judge([group(["c"])])
    processes = {sample.reward_parts["process"] for one in (judged, again) for sample in one.samples}
    assert len(processes) == 1


def _is_sleeper(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().endswith("time.sleep(613)\0")
    except OSError:
        return False
