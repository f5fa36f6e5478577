"""Dynamic sampling: which groups are kept, how many prompts come next, and when the budget ends it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.config.schema import RunConfig
from rlmegatron.trainer.act import Tally, _ranges, choose
from rlmegatron.types import Prompt, Sample, SampleGroup


def group(prompt_id: int, *rewards: float, cut_off: tuple[int, ...] = (), **parts: tuple[float, ...]) -> SampleGroup:
    """Answers with these rewards; `cut_off` numbers those that ended at the length limit."""
    samples = tuple(
        Sample(
            prompt_id,
            i,
            (),
            (),
            (),
            "length" if i in cut_off else "stop",
            "",
            reward,
            {name: values[i] for name, values in parts.items()},
        )
        for i, reward in enumerate(rewards)
    )
    return SampleGroup(Prompt(prompt_id, (1,), "", {}, ""), samples)


def config(**sections: Any) -> RunConfig:
    """A run with these sections, which compares rewards unless `by` says otherwise."""
    needed = {"name": "run", "model": {"path": "m"}, "data": {"train": [{"path": "p"}]}, "train": {"steps": 1}}
    return RunConfig.model_validate({**needed, **sections})


def test_groups_that_differ_are_kept_in_the_order_of_drawing() -> None:
    ranges = _ranges(config(), [group(9, 0, 1), group(4, 1, 1), group(2, 0, 0.5), group(7, 0, 0)])
    tally, chosen = choose(Tally(), ranges, wanted=8, threshold=0.5)
    assert chosen == {2, 9}
    assert tally == Tally(tried=4, kept=2, low=1, high=1)
    tally, chosen = choose(
        tally, _ranges(config(), [group(11, 0, 1), group(10, 1, 0), group(12, 0, 1)]), wanted=4, threshold=0.5
    )
    assert chosen == {10, 11}
    assert tally == Tally(tried=7, kept=4, low=1, high=1, surplus=1)
    assert {name: metric.values(name)[name] for name, metric in tally.metrics().items()} == {
        "dynamic_sampling/prompts_tried": 7,
        "dynamic_sampling/differ": 5 / 7,
        "dynamic_sampling/all_low": 1 / 7,
        "dynamic_sampling/all_high": 1 / 7,
    }


def test_a_part_of_the_reward_can_decide() -> None:
    """DAPO compares correctness, whatever a penalty on length makes of the reward."""
    groups = [group(1, 0.9, 0.8, right=(1, 1)), group(2, 0.5, 0.5, right=(0, 1))]
    right = config(rollout={"dynamic_sampling": {"by": "right"}}, reward={"clip": (0.0, 0.5)})
    assert choose(Tally(), _ranges(right, groups), wanted=2, threshold=0.5)[1] == {2}
    with pytest.raises(ValueError, match=r"dynamic_sampling.by: the reward has no part 'acc'; it has reward, right"):
        _ranges(config(rollout={"dynamic_sampling": {"by": "acc"}}), groups)


def test_a_group_must_differ_in_what_credit_will_see() -> None:
    """Else it is kept without a gradient: once cut-off answers are dropped, or rewards are cut to their bounds."""
    groups = [group(1, 1, 1, 0, cut_off=(2,)), group(2, 1, 0, 1, cut_off=(2,)), group(3, 1, 0, cut_off=(0, 1))]
    assert _ranges(config(), groups) == {1: (0, 1), 2: (0, 1), 3: (0, 1)}
    assert _ranges(config(algorithm={"drop_cut_off": True}), groups) == {1: (1, 1), 2: (0, 1), 3: (0, 0)}
    clipped = config(reward={"clip": (-1.0, 1.0)})
    assert _ranges(clipped, [group(1, 2, 7), group(2, -3, 7), group(3, 0, 0.5)]) == {1: (1, 1), 2: (-1, 1), 3: (0, 0.5)}


def test_a_failed_answer_has_a_reward_and_no_part() -> None:
    """By reward it is compared with its score, as credit sees it; by a part the others are compared without it."""
    fails = {"error": 1.0}
    groups = [
        parted(1, (1.0, {"right": 1}), (-1.0, fails), (1.0, {"right": 1})),
        parted(2, (1.0, {"right": 1}), (-1.0, fails), (0.0, {"right": 0})),
        parted(3, (-1.0, fails), (-1.0, fails)),
    ]
    by_part = config(rollout={"dynamic_sampling": {"by": "right"}}, reward={"on_error": "score", "error_score": -1})
    assert _ranges(by_part, groups) == {1: (1, 1), 2: (0, 1), 3: (-1, -1)}
    assert _ranges(config(), groups) == {1: (-1, 1), 2: (-1, 1), 3: (-1, -1)}
    with pytest.raises(ValueError, match="the reward has no part 'acc'; it has reward, right$"):
        _ranges(config(rollout={"dynamic_sampling": {"by": "acc"}}), groups)


def parted(prompt_id: int, *judged: tuple[float, dict[str, float]]) -> SampleGroup:
    """Answers with these rewards and parts; one that did not fail says so."""
    whole = group(prompt_id, *(reward for reward, _ in judged))
    samples = (replace(s, reward_parts={"error": 0.0, **p}) for s, (_, p) in zip(whole.samples, judged, strict=True))
    return replace(whole, samples=tuple(samples))


def test_further_draws_follow_the_share_that_differed() -> None:
    assert Tally().next_draw(wanted=64, budget=640) == 64
    assert Tally(tried=64, kept=48).next_draw(wanted=64, budget=640) == math.ceil(16 / 0.75)
    assert Tally(tried=64, kept=1).next_draw(wanted=64, budget=640) == 64  # never more than a whole step at once
    assert Tally(tried=64).next_draw(wanted=64, budget=640) == 64
    assert Tally(tried=630, kept=3).next_draw(wanted=64, budget=640) == 10  # what the budget leaves


@settings(max_examples=100, deadline=None)
@given(
    wanted=st.integers(1, 20), ratio=st.integers(2, 10), kinds=st.lists(st.integers(0, 2), min_size=200, max_size=200)
)
def test_the_budget_is_never_exceeded_and_every_prompt_is_counted_once(
    wanted: int, ratio: int, kinds: list[int]
) -> None:
    values = [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    tally, drawn, kept = Tally(), 0, 0
    while tally.kept < wanted and tally.tried < ratio * wanted:
        num = tally.next_draw(wanted=wanted, budget=ratio * wanted)
        assert num > 0
        tally, chosen = choose(
            tally, {drawn + i: values[kinds[drawn + i]] for i in range(num)}, wanted=wanted, threshold=0.5
        )
        drawn, kept = drawn + num, kept + len(chosen)
    assert tally.tried == drawn <= ratio * wanted
    assert tally.tried == tally.kept + tally.surplus + tally.low + tally.high
    assert tally.kept == kept == min(wanted, kinds[:drawn].count(2))
