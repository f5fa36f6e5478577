"""Evaluation over several engines: every prompt of every set counts, wherever its answers come from.

Engines are stand-ins that answer at once; that real ones answer the same on every rank is tested with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import run_ranks

from rlmegatron.config.schema import EvalConfig, RolloutConfig
from rlmegatron.rollout.api import GenerationRequest, SamplingConfig
from rlmegatron.types import Prompt, Sample

SETS = {"uneven": 7, "one": 1}
"""Number of prompts: of three engines, 7 give the first one more than the others, and 1 gives them none."""
NUM_CORRECT = [0, 1, 2, 3, 4, 0, 1]
"""Of four answers to each prompt: the first ones."""
ROLLOUT = RolloutConfig(temperature=0.9, top_p=0.8, top_k=5, max_new_tokens=6, stop_token_ids=(2,))


class Answering:
    """Answers at once, with a text that names prompt and answer, and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[SamplingConfig] = []

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Sample]:
        self.asked.append(sampling)
        return [
            Sample(one.prompt_id, one.index, (1,), (0.0,), (3,), "stop", f"{one.prompt_id} {one.index}")
            for one in requests
        ]


def correctness(answer: Any) -> float:
    prompt_id, index = map(int, answer.response.split())
    return float(index < NUM_CORRECT[prompt_id])


def evaluated(directory: Path, settings: dict[str, Any], ranks_of_engine: int) -> dict[str, Any]:
    """What `evaluate` returns and says on this rank, and what it asked of this rank's engine."""
    from rlmegatron.distributed.world import start_world
    from rlmegatron.rewards.judge import Judge
    from rlmegatron.rewards.table import Reward
    from rlmegatron.rollout.placement import engine_of, place_engines
    from rlmegatron.trainer.collect import Rollout
    from rlmegatron.trainer.evaluate import evaluate

    world = start_world(timeout_s=60)
    engines = place_engines(world_size=world.size, tensor=ranks_of_engine, ranks_per_node=world.size, train_tensor=1)
    placement = engine_of(world.rank, engines)
    engine: Any = Answering() if placement.lead == world.rank else None
    reward = Reward("correctness", correctness, {}, is_linear=True)
    said: list[str] = []
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(eval=EvalConfig(sets=dict.fromkeys(SETS, ""), **settings)),
        world=world,
        rollout=Rollout(ROLLOUT, engines, engine, placement.index, seed=1),
        reward=Judge(reward, timeout_s=5.0, workers=1, on_error="stop", error_score=0.0),
        eval_sets={name: [Prompt(i, (1, 2), str(i), {}, "") for i in range(num)] for name, num in SETS.items()},
        directory=directory,
        say=said.append,
    )
    return {"metrics": evaluate(run, 3), "said": said, "asked": engine.asked if engine else []}


@pytest.mark.parametrize(("num_ranks", "ranks_of_engine"), [(3, 1), (2, 2)], ids=str)
def test_every_prompt_counts_on_any_number_of_engines(tmp_path: Path, num_ranks: int, ranks_of_engine: int) -> None:
    found = run_ranks(evaluated, num_ranks, tmp_path, {"samples": 4, "pass_at": (1, 3)}, ranks_of_engine)
    assert found[0]["metrics"] == pytest.approx(
        {
            "eval/uneven/num_prompts": 7,
            "eval/uneven/greedy_accuracy": 5 / 7,  # the first answer alone, that of all but prompts 0 and 5
            "eval/uneven/greedy_reward": 5 / 7,
            "eval/uneven/greedy_length": 1,
            "eval/uneven/greedy_stderr": (5 / 7 * 2 / 7 / 6) ** 0.5,
            "eval/uneven/sampled_accuracy": 11 / 28,
            "eval/uneven/sampled_reward": 11 / 28,
            "eval/uneven/sampled_length": 1,
            # Squared distances of 0, 1, 2, 3, 4, 0, 1 quarters from 11/7 quarters: 96/7 sixteenths.
            "eval/uneven/sampled_stderr": (96 / 7 / 16 / 6 / 7) ** 0.5,
            "eval/uneven/avg_at_4": 11 / 28,
            "eval/uneven/pass_at_1": 11 / 28,
            "eval/uneven/pass_at_3": (0 + 3 / 4 + 1 + 1 + 1 + 0 + 3 / 4) / 7,
            "eval/one/num_prompts": 1,
            **{f"eval/one/greedy_{name}": value for name, value in (("accuracy", 0), ("reward", 0), ("length", 1))},
            **{f"eval/one/sampled_{name}": value for name, value in (("accuracy", 0), ("reward", 0), ("length", 1))},
            **dict.fromkeys(("eval/one/avg_at_4", "eval/one/pass_at_1", "eval/one/pass_at_3"), 0),
        }
    )
    assert all(of_rank["metrics"] == found[0]["metrics"] for of_rank in found)
    lines = (tmp_path / "eval" / "uneven" / "step_000003_sampled.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [(row["prompt_id"], row["sample"]) for row in answers] == [(p, s) for p in range(7) for s in range(4)]
    assert [row["response"] for row in answers] == [f"{p} {s}" for p in range(7) for s in range(4)]


def test_answers_are_drawn_as_the_evaluation_says_and_otherwise_as_in_training(tmp_path: Path) -> None:
    (found,) = run_ranks(evaluated, 1, tmp_path, {"samples": 2}, 1)
    greedy, sampled = SamplingConfig(0.0, 6, stop_token_ids=(2,)), SamplingConfig(0.9, 6, 0.8, 5, (2,))
    assert found["asked"] == [greedy, sampled] * 2
    own = {"greedy": False, "samples": 2, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 9}
    (found,) = run_ranks(evaluated, 1, tmp_path / "own", own, 1)
    assert found["asked"] == [SamplingConfig(0.6, 9, 0.95, 5, (2,))] * 2
    assert not any("greedy" in name for name in found["metrics"])
    assert sorted(path.name for path in (tmp_path / "own" / "eval" / "one").iterdir()) == ["step_000003_sampled.jsonl"]
    assert found["said"] == [
        "evaluating uneven after step 3: 2 sampled answers to each of 7 prompts",
        "evaluating one after step 3: 2 sampled answers to each of 1 prompts",
    ]
