"""Rewards are clipped, then whitened over the step, in any order of the samples."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.reward_shaping import shape_rewards


def slow_shape(rewards, clip, whiten):
    cut = [min(max(r, clip[0]), clip[1]) for r in rewards] if clip else rewards
    if not whiten:
        return cut
    if len(set(cut)) <= 1:
        return [0.0] * len(cut)
    mean, var = statistics.fmean(cut), statistics.variance(cut)
    return [(r - mean) / math.sqrt(var + 1e-8) for r in cut]


@given(
    st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-1e3, 1e3, width=32)), max_size=20),
    st.sampled_from([None, (-1.0, 1.0), (0.5, 0.5), (-math.inf, 2.0)]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_it_is_what_a_loop_says(rewards, clip, whiten):
    shaped = shape_rewards(torch.tensor(rewards, dtype=torch.float64), clip=clip, whiten=whiten)
    assert shaped.tolist() == pytest.approx(slow_shape(rewards, clip, whiten), rel=1e-9, abs=1e-9)


def test_clipping_comes_before_whitening():
    # Cut: -1, 1, 1, 1. Mean 0.5, squared deviations 2.25 + 3 * .25 = 3, over n - 1 = 3: std 1.
    shaped = shape_rewards(torch.tensor([-5.0, 1.0, 2.0, 90.0]), clip=(-1.0, 1.0), whiten=True)
    assert shaped.tolist() == pytest.approx([-1.5, 0.5, 0.5, 0.5])


def test_a_small_spread_on_a_large_offset_is_still_whitened():
    """Sums of squares would lose it: 1e8 ** 2 has no room for 1 in float64."""
    shaped = shape_rewards(torch.tensor([1e8, 1e8 + 1, 1e8 + 2], dtype=torch.float64), clip=None, whiten=True)
    assert shaped.tolist() == pytest.approx([-1.0, 0.0, 1.0])


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7, [-1 / 3] * 3])
def test_equal_rewards_become_exactly_0(rewards):
    shaped = shape_rewards(torch.tensor(rewards, dtype=torch.float64), clip=None, whiten=True)
    assert shaped.tolist() == [0.0] * len(rewards)


def test_a_permutation_of_the_step_permutes_the_rewards_to_the_last_bit():
    rng = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 10, (50,), generator=rng).double() / 10
    straight = shape_rewards(rewards, clip=(0.1, 0.8), whiten=True)
    for _ in range(20):
        order = torch.randperm(50, generator=rng)
        assert torch.equal(shape_rewards(rewards[order], clip=(0.1, 0.8), whiten=True), straight[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once_at_the_end(dtype):
    rewards = torch.tensor([0.1, 0.7, 300.0, 301.0]).to(dtype)
    shaped = shape_rewards(rewards, clip=(0.3, 300.5), whiten=True)
    assert shaped.dtype == dtype
    assert torch.equal(shaped, shape_rewards(rewards.double(), clip=(0.3, 300.5), whiten=True).to(dtype))


def test_nothing_asked_changes_nothing():
    rewards = torch.tensor([0.1, -7.0])
    assert torch.equal(shape_rewards(rewards, clip=None, whiten=False), rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named_and_not_clipped_away(bad):
    with pytest.raises(ValueError, match=f"reward of sample 1 is {bad}"):
        shape_rewards(torch.tensor([0.0, bad]), clip=(-1.0, 1.0), whiten=False)


@pytest.mark.parametrize("clip", [(1.0, 0.0), (math.nan, 1.0), (0.0, math.nan)])
def test_bounds_the_wrong_way_round_are_refused(clip):
    with pytest.raises(ValueError, match="clip must be .low, high. with low <= high"):
        shape_rewards(torch.zeros(2), clip=clip, whiten=False)
