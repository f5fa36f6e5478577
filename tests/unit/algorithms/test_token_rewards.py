"""Rewards land on the last counted token of their own sample, and nowhere else."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.token_rewards import token_rewards


def slow_token_rewards(rewards, mask, cu_seqlens, kl, kl_coef):
    out = [-kl_coef * kl[t] if mask[t] else 0.0 for t in range(len(mask))]
    for i, reward in enumerate(rewards):
        counted = [t for t in range(cu_seqlens[i], cu_seqlens[i + 1]) if mask[t]]
        if counted:
            out[counted[-1]] += reward
    return out


@given(st.lists(st.integers(0, 6), max_size=5), st.floats(0, 2), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_rewards_and_divergence_are_what_a_loop_says(lengths, kl_coef, seed):
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), generator=rng).double()
    mask = torch.rand(sum(lengths), generator=rng) < 0.5
    kl = torch.randn(sum(lengths), generator=rng).double()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    expected = slow_token_rewards(rewards.tolist(), mask.tolist(), cu_seqlens.tolist(), kl.tolist(), kl_coef)
    assert token_rewards(rewards, mask, cu_seqlens, kl=kl, kl_coef=kl_coef).tolist() == pytest.approx(expected)


def test_the_reward_of_an_empty_answer_touches_no_token():
    """At index -1 it would land on the last token of the batch, or of the sample before."""
    mask = torch.tensor([True, True, False, True])
    out = token_rewards(torch.tensor([1.0, 100.0, 100.0, 2.0]), mask, torch.tensor([0, 2, 2, 3, 4]))
    assert out.tolist() == [0.0, 1.0, 0.0, 2.0]


def test_divergence_at_tokens_that_do_not_count_is_not_charged():
    kl = torch.tensor([math.nan, 2.0])
    out = token_rewards(torch.tensor([1.0]), torch.tensor([False, True]), torch.tensor([0, 2]), kl=kl, kl_coef=0.25)
    assert out.tolist() == [0.0, 0.5]


def test_a_coefficient_without_a_divergence_is_refused():
    with pytest.raises(ValueError, match="kl_coef is 0.1, but no kl was given"):
        token_rewards(torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]), kl_coef=0.1)


def test_one_reward_per_sequence():
    with pytest.raises(ValueError, match="rewards has 2 entries, but cu_seqlens delimits 1"):
        token_rewards(torch.ones(2), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(bad):
    mask, cu_seqlens = torch.tensor([True, False, True]), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match=f"reward of sample 1 is {bad}"):
        token_rewards(torch.tensor([0.0, bad]), mask, cu_seqlens)


def test_half_precision_rounds_once_at_the_end():
    rewards, kl = torch.tensor([1.0]).bfloat16(), torch.tensor([0.013, 0.777])
    mask, cu_seqlens = torch.ones(2, dtype=torch.bool), torch.tensor([0, 2])
    out = token_rewards(rewards, mask, cu_seqlens, kl=kl, kl_coef=0.3)
    exact = torch.tensor([-0.3 * float(kl[0]), 1 - 0.3 * float(kl[1])], dtype=torch.float64)
    assert torch.equal(out, exact.bfloat16())


def test_no_sequences_have_no_rewards():
    assert token_rewards(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.tensor([0])).shape == (0,)
