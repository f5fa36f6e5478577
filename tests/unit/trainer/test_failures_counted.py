"""Failed judgements are counted wherever answers are judged: dropped groups, greedy answers and evaluations too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmegatron.config.schema import EvalConfig, RunConfig
from rlmegatron.metrics.log import StepLog
from rlmegatron.rewards.api import Answer
from rlmegatron.rewards.judge import Judge
from rlmegatron.rewards.table import Reward
from rlmegatron.trainer import act, evaluate
from rlmegatron.trainer.batch import _facts
from rlmegatron.trainer.step_metrics import answer_metrics
from rlmegatron.types import Prompt, Sample, SampleGroup


class OneRank:
    """A world of one rank, without processes."""

    is_lead, size, rank = True, 1, 0

    def lead(self, decide: Any) -> Any:
        return decide()

    settle = staticmethod(lambda phase, work: work())
    collect = staticmethod(lambda phase, work: [work()])
    exchange = staticmethod(lambda parts: parts)


def right(answer: Answer) -> dict[str, float]:
    if answer.response == "fail":
        raise RuntimeError("the checker is down")
    return {"reward": float(answer.response), "right": float(answer.response)}


def judging(on_error: Any) -> Judge:
    reward = Reward("right", right, {}, is_linear=True)
    return Judge(reward, timeout_s=5.0, workers=1, on_error=on_error, error_score=-1.0)


def group(prompt_id: int, texts: Sequence[str]) -> SampleGroup:
    samples = [Sample(prompt_id, i, (1,), (0.0,), (0,), "stop", text) for i, text in enumerate(texts)]
    return SampleGroup(Prompt(prompt_id, (1,), "", {}, ""), tuple(samples))


def acted(
    monkeypatch: pytest.MonkeyPatch,
    sampled: list[list[str]],
    greedy: list[str],
    *,
    on_error: str = "score",
    **rollout: Any,
) -> tuple[list[SampleGroup], dict[str, float]]:
    """The groups of one step and what it noted; prompt i has the answers `sampled[i]` and, if asked, `greedy[i]`."""

    def answers(run: Any, prompts: Sequence[int], sampling: Any, *, purpose: str, **_: Any) -> list[SampleGroup]:
        return [group(i, [greedy[i]] if purpose == "greedy" else sampled[i]) for i in prompts]

    monkeypatch.setattr(act, "generate_or_recover", answers)
    needed = {"name": "run", "model": {"path": "m"}, "data": {"train": [{"path": "p"}]}, "train": {"steps": 1}}
    numbers = iter(range(len(sampled)))
    run: Any = SimpleNamespace(
        cfg=RunConfig.model_validate({**needed, "rollout": rollout}),
        world=OneRank(),
        prompts=SimpleNamespace(take=lambda num: [next(numbers) for _ in range(num)]),
        rollout=SimpleNamespace(training_sampling=lambda: None, greedy_sampling=lambda: None),
        reward=judging(on_error),
        needs_greedy=bool(greedy),
        say=print,
    )
    log = StepLog(1)
    groups = act.act(run, log, 1)
    log.add(answer_metrics(_facts(groups), accuracy_threshold=0.5))  # what the loop notes of the answers that are left
    return groups, StepLog.merge([log.payload()])


def test_answers_that_dynamic_sampling_leaves_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four groups of three are drawn for two; 3 of 12 judgements failed, 1 of the 6 that are kept."""
    sampled = [["fail", "1", "1"], ["0", "1", "fail"], ["0", "0", "fail"], ["1", "0", "0"]]
    dynamic = {"enabled": True, "by": "right", "max_prompts_ratio": 2}
    groups, noted = acted(monkeypatch, sampled, [], prompts_per_step=2, samples_per_prompt=3, dynamic_sampling=dynamic)
    assert [one.prompt.id for one in groups] == [1, 3]
    assert noted["reward_parts/error"] == 3 / 12
    assert noted["reward_parts/right"] == 2 / 5
    assert noted["dynamic_sampling/all_high"] == noted["dynamic_sampling/all_low"] == 1 / 4


def test_greedy_baselines_that_failed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, noted = acted(monkeypatch, [["1"], ["0"]], ["fail", "1"], prompts_per_step=2, samples_per_prompt=1)
    assert [one.greedy_reward for one in groups] == [-1.0, 1.0]
    assert noted["reward_parts/error"] == 1 / 4
    assert noted["reward_parts/right"] == 1 / 2


def test_where_a_failure_stops_the_run_there_is_nothing_to_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, noted = acted(monkeypatch, [["1"], ["0"]], ["0", "1"], on_error="stop", prompts_per_step=2, samples_per_prompt=1)
    assert "reward_parts/error" not in noted and noted["reward_parts/right"] == 1 / 2
    assert not any("error" in name for name in evaluated(monkeypatch, tmp_path, [["1", "0"]], on_error="stop"))


def evaluated(
    monkeypatch: pytest.MonkeyPatch, directory: Path, sampled: list[list[str]], *, on_error: str
) -> dict[str, float]:
    def answers(run: Any, prompts: Sequence[Prompt], sampling: Any, *, num_samples: int, **_: Any) -> list[SampleGroup]:
        return [group(one.id, sampled[one.id][:num_samples]) for one in prompts]

    monkeypatch.setattr(evaluate, "generate_or_recover", answers)
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(eval=EvalConfig(sets={"held": ""}, samples=len(sampled[0]))),
        world=OneRank(),
        rollout=SimpleNamespace(eval_sampling=lambda *_, **__: None),
        reward=judging(on_error),
        eval_sets={"held": [group(i, []).prompt for i in range(len(sampled))]},
        directory=directory,
        say=print,
    )
    return evaluate.evaluate(run, 3)


def test_an_evaluation_says_how_many_of_its_judgements_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four prompts one first answer failed, and 3 of 8 answers."""
    sampled = [["fail", "fail"], ["1", "fail"], ["0", "1"], ["1", "1"]]
    found = evaluated(monkeypatch, tmp_path, sampled, on_error="score")
    assert found["eval/held/greedy_error"] == 1 / 4
    assert found["eval/held/sampled_error"] == 3 / 8
    assert found["eval/held/sampled_accuracy"] == 4 / 8 and found["eval/held/greedy_reward"] == (-1 + 1 + 0 + 1) / 4
    lines = (tmp_path / "eval" / "held" / "step_000003_greedy.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward_parts"]["error"] for line in lines] == [1, 0, 0, 0]
