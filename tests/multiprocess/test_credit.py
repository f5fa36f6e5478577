"""Credit over ranks: rewards to advantages, returns and weights, against plain loops over all samples.

Members of a group lie on different ranks. What this does not prove: that log-probabilities are right, which are made up
here, or anything about the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks
from step_gradients import held_groups, judged_samples

from rlmegatron.algorithms.table import resolve
from rlmegatron.algorithms.value_scale import ReturnScale
from rlmegatron.config.algorithm import AlgorithmConfig
from rlmegatron.config.schema import RewardConfig
from rlmegatron.data.mini_batches import by_group
from rlmegatron.distributed.world import start_world
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.batch import build_step_batch
from rlmegatron.trainer.credit import Credit

Key = tuple[int, int]
"""(prompt id, sample number)."""


@dataclass(frozen=True)
class Settings:
    """Sections `algorithm` and `reward`, whether the critic's returns are scaled, and which prompts there are."""

    algorithm: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any] = field(default_factory=dict)
    scaled: bool = False
    prompts: tuple[int, ...] = (0, 1, 2, 3)


def stand_in(key: Key, position: int, shift: float) -> float:
    """A made-up number of one answer token."""
    return math.sin(shift + 1.3 * key[0] + 0.7 * key[1] + position)


def credited(settings: Settings) -> dict[Key, dict[str, Any]]:
    """What this rank's samples get, by sample: advantages, returns, importance and mask of their answer tokens."""
    world = start_world(timeout_s=60)
    config = AlgorithmConfig(**settings.algorithm)
    batch = build_step_batch(
        world,
        [group for group in held_groups(world, order=world.size) if group.prompt.id in settings.prompts],
        dp_ranks=range(world.size),
        split=lambda facts: by_group([sample.prompt_id for sample in facts], 2),
        drop_cut_off=config.drop_cut_off,
        max_tokens=30,
        micro_batch_multiple=1,
        device=world.device,
    )
    local = batch.local
    keys = [(batch.facts[number].prompt_id, batch.facts[number].index) for number in batch.own]
    bounds = local.cu_seqlens.tolist()
    rows = {name: torch.zeros(local.num_tokens) for name in ("old_logp", "ref_logp", "values")}
    for key, start, stop in zip(keys, bounds[:-1], bounds[1:], strict=True):
        answer = [place for place in range(start, stop) if local.loss_mask[place]]
        for position, place in enumerate(answer):
            for shift, name in enumerate(rows):
                rows[name][place] = stand_in(key, position, shift)
    scale = ReturnScale().update(torch.tensor([2.0, 6.0, 26.0])) if settings.scaled else None
    assert dist.group.WORLD is not None
    credit = Credit(
        resolve("advantage", config.advantage),
        config,
        RewardConfig(**settings.reward),
        Adapted(config.kl.coef, scale),
        dist.group.WORLD,
        world.gather,
    )
    found, _ = credit.assign(batch.with_local(local.with_tensors(**rows)))
    out: dict[Key, dict[str, Any]] = {}
    for key, start, stop in zip(keys, bounds[:-1], bounds[1:], strict=True):
        rows_of = local.loss_mask[start:stop]
        out[key] = {
            name: getattr(found.local, name)[start:stop][rows_of].tolist()
            for name in ("advantages", "returns", "importance", "loss_mask")
            if getattr(found.local, name) is not None
        }
    return out


def over_ranks(settings: Settings, size: int) -> dict[Key, dict[str, Any]]:
    return {key: value for part in run_ranks(credited, size, settings) for key, value in part.items()}


def rewards_of(keep: Callable[[Any], bool] = lambda sample: True) -> dict[Key, float]:
    return {
        (prompt.id, sample.index): sample.reward  # type: ignore[misc]
        for prompt, sample, _ in judged_samples()
        if keep(sample)
    }


def lengths() -> dict[Key, int]:
    return {(prompt.id, sample.index): len(sample.token_ids) for prompt, sample, _ in judged_samples()}


def members(rewards: dict[Key, float], prompt: int) -> list[float]:
    return [reward for (other, _), reward in rewards.items() if other == prompt]


def assert_advantages(found: dict[Key, dict[str, Any]], expected: dict[Key, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key]["advantages"] == pytest.approx(values, abs=1e-5), key


@pytest.mark.parametrize("size", [1, 4])
def test_grpo_whose_cut_off_answers_count_nowhere(size: int) -> None:
    """Neither in the baseline of their group nor in its standard deviation; and rewards are clipped first."""
    found = over_ranks(Settings({"drop_cut_off": True}, {"clip": (0.1, 1.2)}), size)
    kept = {key: min(max(r, 0.1), 1.2) for key, r in rewards_of(lambda sample: sample.finish_reason == "stop").items()}
    assert len(kept) < len(rewards_of()), "no answer of these is cut off"
    expected = {}
    for key, reward in kept.items():
        group = members(kept, key[0])
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / max(1, len(group) - 1))
        advantage = 0.0 if len(set(group)) == 1 else (reward - mean) / (std + 1e-6)
        expected[key] = [advantage] * lengths()[key]
    assert_advantages(found, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_reinforce_pp_is_whitened_over_the_tokens_of_all_ranks(size: int) -> None:
    kl = {"where": "reward", "estimator": "k2", "coef": 0.1}
    found = over_ranks(Settings({"advantage": "reinforce_pp", "gamma": 0.9, "kl": kl}), size)
    raw: dict[Key, list[float]] = {}
    for key, reward in rewards_of().items():
        charged = [0.1 * (stand_in(key, t, 0) - stand_in(key, t, 1)) ** 2 / 2 for t in range(lengths()[key])]
        to_go, total = [], 0.0
        for t in reversed(range(lengths()[key])):
            total = (reward if t == lengths()[key] - 1 else 0.0) - charged[t] + 0.9 * total
            to_go.append(total)
        raw[key] = to_go[::-1]
    tokens = [value for row in raw.values() for value in row]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1) + 1e-8)
    assert_advantages(found, {key: [(value - mean) / std for value in row] for key, row in raw.items()})


def test_rloo_charges_the_divergence_of_the_answer() -> None:
    kl = {"where": "reward", "estimator": "k1", "coef": 0.5}
    found = over_ranks(Settings({"advantage": "rloo", "kl": kl}, {"whiten": True}), 2)
    rewards = rewards_of()
    mean = sum(rewards.values()) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards.values()) / (len(rewards) - 1) + 1e-8)
    totals = {
        key: (reward - mean) / std - 0.5 * sum(stand_in(key, t, 0) - stand_in(key, t, 1) for t in range(lengths()[key]))
        for key, reward in rewards.items()
    }
    expected = {}
    for key, total in totals.items():
        others = [value for other, value in totals.items() if other[0] == key[0] and other != key]
        expected[key] = [total - sum(others) / len(others)] * lengths()[key]
    assert_advantages(found, expected)


def test_remax_compares_with_the_greedy_answer() -> None:
    found = over_ranks(Settings({"advantage": "remax"}), 2)
    assert_advantages(found, {key: [reward - 0.4] * lengths()[key] for key, reward in rewards_of().items()})


def test_a_scaled_critic_speaks_in_the_units_of_rewards() -> None:
    """Its scale before the step is mean 3, deviation 2: gae works on 2 v + 3, and returns leave in the new scale."""
    found = over_ranks(Settings({"advantage": "gae", "lam": 1.0, "whiten": False}, scaled=True), 2)
    advantages, returns = {}, []
    for key, reward in rewards_of().items():
        values = [2 * stand_in(key, t, 2) + 3 for t in range(lengths()[key])]
        advantages[key] = [reward - value for value in values]  # gamma and lam 1: the return is the reward
        returns += [reward] * lengths()[key]
    assert_advantages(found, advantages)
    decay = 0.99
    weight = 1 - decay**2
    mean = (decay * (1 - decay) * 3 + (1 - decay) * sum(returns) / len(returns)) / weight
    mean_sq = (decay * (1 - decay) * 13 + (1 - decay) * sum(r * r for r in returns) / len(returns)) / weight
    std = math.sqrt(mean_sq - mean * mean)
    for key, reward in rewards_of().items():
        assert found[key]["returns"] == pytest.approx([(reward - mean) / std] * lengths()[key], abs=1e-5)


def test_masked_answers_leave_the_batch_and_others_are_weighted() -> None:
    """By the geometric mean of learner / engine; the advantage was computed with all of them."""
    bounds = {"level": "geometric", "mode": "mask", "low": 15.0, "high": 25.0}
    found = over_ranks(Settings({"advantage": "opo", "importance": bounds}), 2)
    engine = {(prompt.id, sample.index): sample.logprobs for prompt, sample, _ in judged_samples()}
    masked = 0
    for key, logprobs in engine.items():
        if logprobs:
            ratio = math.exp(
                sum(stand_in(key, t, 0) - engine_logp for t, engine_logp in enumerate(logprobs)) / len(logprobs)
            )
            kept = 15.0 <= ratio <= 25.0
            masked += not kept
            assert found[key]["loss_mask"] == [kept] * len(logprobs)
            assert found[key]["importance"] == pytest.approx([ratio if kept else 0.0] * len(logprobs), rel=1e-4)
    assert 0 < masked < len(engine) - 1


@pytest.mark.parametrize("settings", [{"advantage": "gae"}, {"importance": {"level": "sequence"}}], ids=str)
def test_ranks_without_a_sample_change_nothing(settings: dict[str, Any]) -> None:
    """Four samples, of which one is empty, on eight ranks and on one."""
    many, alone = (over_ranks(Settings(settings, prompts=(0,)), size) for size in (8, 1))
    assert len(many) == 4
    assert_advantages(many, {key: found["advantages"] for key, found in alone.items()})


def unjudged() -> None:
    from rlmegatron.trainer.batch import SampleFacts, StepBatch
    from rlmegatron.trainer.credit import _refuse_unjudged

    facts = [SampleFacts(7, 2, 3, 4, math.inf, math.nan, False, ())]
    _refuse_unjudged(StepBatch(facts, [], None, [], []))  # type: ignore[arg-type]


def test_a_reward_that_is_no_number_names_its_sample() -> None:
    with pytest.raises(RanksFailed, match="reward of sample 2 of prompt 7 is inf"):
        run_ranks(unjudged, 1)
