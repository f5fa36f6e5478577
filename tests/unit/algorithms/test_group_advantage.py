"""GRPO's advantage against a slow loop, against numbers worked out by hand, and at its edges."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.group import grpo


def slow_grpo(rewards, group_ids, normalize_std):
    advantages = []
    for reward, group in zip(rewards, group_ids, strict=True):
        members = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
        if len(members) == 1 or len(set(members)) == 1:
            advantages.append(0.0)
            continue
        scale = statistics.stdev(members) + 1e-6 if normalize_std else 1.0
        advantages.append((reward - statistics.fmean(members)) / scale)
    return advantages


def test_hand_worked_group():
    # Mean 0.25, squared deviations .5625 + 3 * .0625 = .75, over n - 1 = 3: std 0.5.
    advantages = grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5]), normalize_std=True)
    assert advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=3e-6)


@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(-2, 2)), max_size=16),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_any_order_of_any_groups_is_what_a_loop_says(samples, normalize_std):
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    advantages = grpo(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        normalize_std=normalize_std,
    )
    assert advantages.tolist() == pytest.approx(slow_grpo(rewards, groups, normalize_std), rel=1e-6, abs=1e-9)


def test_a_permutation_of_the_batch_permutes_the_advantages():
    rng = torch.Generator().manual_seed(3)
    rewards, groups = torch.rand(24, generator=rng), torch.arange(24) % 3
    order = torch.randperm(24, generator=rng)
    straight = grpo(rewards, groups, normalize_std=True)
    assert torch.allclose(grpo(rewards[order], groups[order], normalize_std=True), straight[order], atol=1e-7, rtol=0)


def test_groups_are_told_apart_by_id_alone():
    """Two prompts of the same text have different ids and must not be compared with each other."""
    rewards = torch.tensor([0.0, 1.0, 10.0, 11.0])
    apart = grpo(rewards, torch.tensor([0, 0, 1, 1]), normalize_std=False)
    assert apart.tolist() == [-0.5, 0.5, -0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exact_zeros(reward, dtype):
    """0.1 + 0.1 + 0.1 is not 3 * 0.1 in floating point: divided by 1e-6 the rest would be a real advantage."""
    advantages = grpo(torch.full((3,), reward, dtype=dtype), torch.zeros(3, dtype=torch.int64), normalize_std=True)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_one_learns_nothing(normalize_std):
    advantages = grpo(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), normalize_std=normalize_std)
    assert advantages[0] == 0.0
    assert advantages[1] < 0 < advantages[2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_named(bad):
    with pytest.raises(ValueError, match=rf"reward of sample 1 \(group 9\) is {bad}"):
        grpo(torch.tensor([0.0, bad, bad]), torch.tensor([9, 9, 9]), normalize_std=True)


def test_an_empty_batch_has_no_advantages():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64), normalize_std=True).shape == (0,)
