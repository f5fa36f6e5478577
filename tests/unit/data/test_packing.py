"""The packing plan: its promises for any lengths, and how near it comes to what is possible."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.data.mini_batches import by_group
from rlmegatron.data.packing import Plan, plan_batches


def plan_in_order(lengths: list[int], num_mini_batches: int, **settings: Any) -> Plan:
    """Every sample a group of its own, so that mini-batches are runs of samples."""
    return plan_batches(lengths, by_group(range(len(lengths)), num_mini_batches), **settings)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), max_size=60),
    num_mini_batches=st.integers(1, 5),
    dp_size=st.integers(1, 5),
    max_tokens=st.integers(1, 80),
    multiple=st.integers(1, 4),
)
def test_every_promise_holds_for_any_lengths(
    lengths: list[int], num_mini_batches: int, dp_size: int, max_tokens: int, multiple: int
) -> None:
    plan = plan_in_order(
        lengths,
        num_mini_batches,
        dp_size=dp_size,
        max_tokens=max_tokens,
        micro_batch_multiple=multiple,
    )
    assert len(plan) == num_mini_batches
    num = len(lengths)
    for k, mini_batch in enumerate(plan):
        expected = list(range(k * num // num_mini_batches, (k + 1) * num // num_mini_batches))
        assert sorted(chain.from_iterable(chain.from_iterable(mini_batch))) == expected
        assert len(mini_batch) == dp_size
        (num_micro_batches,) = {len(rank) for rank in mini_batch}
        assert num_micro_batches % multiple == 0 and (num_micro_batches == 0) == (not expected)
        micro_batches = list(chain.from_iterable(mini_batch))
        assert all(len(one) <= 1 or sum(lengths[i] for i in one) <= max_tokens for one in micro_batches)
        assert all(one == sorted(one) for one in micro_batches)
        assert len(expected) < len(micro_batches) or all(micro_batches)


def test_small_cases_by_hand() -> None:
    # 6 + 5 and 4 + 3 on one rank each would not fit 9 tokens: 6 + 3 and 5 + 4 do.
    assert plan_in_order([6, 5, 4, 3], 1, dp_size=2, max_tokens=9) == [[[[0, 3]], [[1, 2]]]]
    assert plan_in_order([2, 2, 2, 2], 2, dp_size=1, max_tokens=9) == [[[[0, 1]]], [[[2, 3]]]]


def test_a_rank_that_got_a_large_micro_batch_gets_a_small_one_next() -> None:
    # Each sample is above the bound and alone; dealt in turn, rank 0 would hold 10 + 7 and rank 1 only 8 + 1.
    plan = plan_in_order([10, 8, 7, 1], 1, dp_size=2, max_tokens=5, micro_batch_multiple=2)
    assert plan == [[[[0], [3]], [[1], [2]]]]


def test_the_bound_holds_where_an_even_spread_over_the_fewest_micro_batches_breaks_it() -> None:
    # 3 + 3 and 2 + 2 + 2 fill two micro-batches of 6, but spread evenly the last 2 would come onto 3 + 2.
    assert plan_in_order([3, 3, 2, 2, 2], 1, dp_size=1, max_tokens=6) == [[[[0, 4], [2, 3], [1]]]]


def test_no_samples_give_no_micro_batches() -> None:
    assert plan_in_order([], 2, dp_size=3, max_tokens=8) == [[[], [], []], [[], [], []]]
    assert plan_in_order([4], 2, dp_size=1, max_tokens=8) == [[[]], [[[0]]]]


def test_fewer_samples_than_ranks_leave_empty_micro_batches() -> None:
    assert plan_in_order([5], 1, dp_size=3, max_tokens=8) == [[[[0]], [[]], [[]]]]
    plan = plan_in_order([5, 6], 1, dp_size=2, max_tokens=100, micro_batch_multiple=2)
    assert plan == [[[[1], []], [[0], []]]]


def test_a_giant_sample_is_alone_in_its_micro_batch() -> None:
    (mini_batch,) = plan_in_order([3, 1000, 3, 0], 1, dp_size=2, max_tokens=10)
    assert mini_batch == [[[1]], [[0, 2, 3]]]


@pytest.mark.timeout(60)  # a search that looks at every pair takes far longer
def test_lengths_just_above_half_need_one_micro_batch_each() -> None:
    (mini_batch,) = plan_in_order([51] * 5000, 1, dp_size=1, max_tokens=100)
    assert len(mini_batch[0]) == 5000


@pytest.mark.parametrize("dp_size", [2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_are_within_a_percent_and_micro_batches_within_a_tenth_of_the_lower_bounds(
    dp_size: int, seed: int
) -> None:
    generator = random.Random(seed)
    lengths = [min(4096, 100 + int(generator.lognormvariate(6, 0.8))) for _ in range(512)]
    max_tokens = 16384
    for mini_batch in plan_in_order(lengths, 2, dp_size=dp_size, max_tokens=max_tokens):
        loads = [[sum(lengths[i] for i in one) for one in rank] for rank in mini_batch]
        total = sum(map(sum, loads))
        assert max(map(sum, loads)) <= 1.01 * total / dp_size
        fewest = -(-total // (max_tokens * dp_size))
        assert len(loads[0]) <= max(fewest + 1, 1.1 * fewest)
        assert max(map(max, loads)) - min(map(min, loads)) <= 0.1 * max_tokens


def test_ranks_are_near_the_best_split_that_exists() -> None:
    # Against every way to give 10 samples to 2 ranks.
    generator = random.Random(0)
    for _ in range(20):
        lengths = [generator.randint(1, 100) for _ in range(10)]
        total = sum(lengths)
        best = min(
            max(part, total - part)
            for choice in range(2**9)
            for part in [sum(length for bit, length in enumerate(lengths) if choice >> bit & 1)]
        )
        (mini_batch,) = plan_in_order(lengths, 1, dp_size=2, max_tokens=1000)
        assert max(sum(lengths[i] for one in rank for i in one) for rank in mini_batch) <= 7 / 6 * best


@pytest.mark.timeout(60)  # it takes a fraction of a second
def test_ten_thousand_samples_are_planned_for_many_ranks() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(100, 5000) for _ in range(10_000)]
    (mini_batch,) = plan_in_order(lengths, 1, dp_size=64, max_tokens=16384, micro_batch_multiple=4)
    assert sorted(i for rank in mini_batch for one in rank for i in one) == list(range(10_000))
    assert {len(rank) % 4 for rank in mini_batch} == {0}


@pytest.mark.parametrize("name", ["dp_size", "max_tokens", "micro_batch_multiple"])
def test_a_count_below_one_is_refused(name: str) -> None:
    counts = {"dp_size": 1, "max_tokens": 1, "micro_batch_multiple": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0, must be at least 1"):
        plan_batches([1], [[0]], **counts)
    with pytest.raises(ValueError, match=r"a length is negative \(-1\)"):
        plan_in_order([1, -1], 1, dp_size=1, max_tokens=1)
