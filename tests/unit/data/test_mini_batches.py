"""Mini-batches: groups stay together, single samples are dealt evenly, and nothing is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.data.mini_batches import by_group, by_sample


@settings(max_examples=200, deadline=None)
@given(group_ids=st.lists(st.integers(-3, 12), max_size=40), num=st.integers(1, 6))
def test_a_group_is_never_cut_and_groups_are_spread_evenly(group_ids: list[int], num: int) -> None:
    parts = by_group(group_ids, num)
    assert len(parts) == num
    assert sorted(number for part in parts for number in part) == list(range(len(group_ids)))
    held = [{group_ids[number] for number in part} for part in parts]
    assert sum(map(len, held)) == len(set(group_ids))  # no group in two parts
    sizes = [len(groups) for groups in held]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100, deadline=None)
@given(num_samples=st.integers(0, 40), num=st.integers(1, 6), seed=st.text(max_size=5))
def test_samples_are_dealt_evenly_by_the_seed_alone(num_samples: int, num: int, seed: str) -> None:
    parts = by_sample(num_samples, num, seed=seed)
    assert parts == by_sample(num_samples, num, seed=seed)
    assert Counter(number for part in parts for number in part) == Counter(range(num_samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_single_samples_mix_groups() -> None:
    # 8 groups of 8 in 2 mini-batches: that no group is cut by chance has a probability of about 1e-17.
    first, _ = by_sample(64, 2, seed="1/split/1")
    assert len({number // 8 for number in first}) > 4
    assert first != by_sample(64, 2, seed="1/split/2")[0]


def test_no_mini_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="the number of mini-batches is 0, must be at least 1"):
        by_group([1], 0)
