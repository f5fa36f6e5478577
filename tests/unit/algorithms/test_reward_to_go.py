"""Rewards to go, and the discounted sum under them, against a backward loop per sequence."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.discounted_sum import discounted_sum
from rlmegatron.algorithms.gae import gae
from rlmegatron.algorithms.reward_to_go import reinforce_pp
from rlmegatron.algorithms.token_rewards import token_rewards


def backward_loop(rewards, mask, cu_seqlens, gamma):
    out = np.zeros(len(rewards))
    for start, end in pairwise(cu_seqlens):
        running = 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                running = rewards[t] + gamma * running
                out[t] = running
    return out


def random_batch(lengths, seed):
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randn(sum(lengths), generator=rng, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=rng) < 0.7
    return rewards, mask, torch.tensor([0, *lengths]).cumsum(0)


@given(st.lists(st.integers(0, 9), max_size=5), st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_it_is_a_backward_loop_over_each_sequence(lengths, gamma, seed):
    rewards, mask, cu_seqlens = random_batch(lengths, seed)
    advantages, returns = reinforce_pp(rewards, mask, cu_seqlens, gamma=gamma)
    expected = backward_loop(rewards.tolist(), mask.tolist(), cu_seqlens.tolist(), gamma)
    assert advantages.tolist() == pytest.approx(list(expected), abs=1e-12)
    assert (torch.equal(advantages, returns) and advantages.data_ptr() != returns.data_ptr()) or not mask.numel()


def test_it_is_gae_without_a_critic():
    rewards, mask, cu_seqlens = random_batch([5, 0, 12, 1, 30], 4)
    mine, _ = reinforce_pp(rewards, mask, cu_seqlens, gamma=0.97)
    critic_free, returns = gae(rewards, torch.zeros_like(rewards), mask, cu_seqlens, gamma=0.97, lam=1.0)
    assert torch.equal(mine, critic_free) and torch.equal(mine, returns)


def test_one_reward_at_the_end_reaches_every_token_discounted_and_the_divergence_only_what_came_before():
    mask, cu_seqlens = torch.tensor([False, True, True, True, False]), torch.tensor([0, 4, 5])
    kl = torch.tensor([9.0, 1.0, 2.0, 4.0, 9.0])
    rewards = token_rewards(torch.tensor([8.0, 5.0]), mask, cu_seqlens, kl=kl, kl_coef=0.5)
    # r - beta (KL_t + ... + KL_T): 8 - 3.5, 8 - 3, 8 - 2.
    assert reinforce_pp(rewards, mask, cu_seqlens, gamma=1.0)[0].tolist() == [0.0, 4.5, 5.0, 6.0, 0.0]
    # 6; -1 + 6 / 2; -0.5 + 2 / 2.
    assert reinforce_pp(rewards, mask, cu_seqlens, gamma=0.5)[0].tolist() == [0.0, 0.5, 2.0, 6.0, 0.0]


@pytest.mark.parametrize("gamma", [1.0, 0.9999])
def test_an_answer_of_200_000_tokens_is_as_exact_as_a_loop_in_float64(gamma):
    lengths = [3, 200_000, 7]
    rewards, _, cu_seqlens = random_batch(lengths, 0)
    every = torch.ones(sum(lengths), dtype=torch.bool)
    advantages, _ = reinforce_pp(rewards, every, cu_seqlens, gamma=gamma)
    expected = backward_loop(rewards.numpy(), every.numpy(), cu_seqlens.tolist(), gamma)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-9)


def test_a_sequence_gets_the_same_bits_alone_and_in_company():
    rewards, mask, cu_seqlens = random_batch([17, 40, 3, 1000], 1)
    packed, _ = reinforce_pp(rewards, mask, cu_seqlens, gamma=0.99)
    for start, end in pairwise(cu_seqlens.tolist()):
        bounds = torch.tensor([0, end - start])
        alone, _ = reinforce_pp(rewards[start:end], mask[start:end], bounds, gamma=0.99)
        assert torch.equal(packed[start:end], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_rounds_once_at_the_end(dtype):
    rewards, mask, cu_seqlens = random_batch([64, 0, 30], 2)
    low = rewards.to(dtype)
    advantages, _ = reinforce_pp(low, mask, cu_seqlens, gamma=0.95)
    assert advantages.dtype == dtype
    assert torch.equal(advantages, reinforce_pp(low.double(), mask, cu_seqlens, gamma=0.95)[0].to(dtype))


def test_a_reward_that_is_no_number_is_named_unless_it_does_not_count():
    rewards, cu_seqlens = torch.tensor([math.nan, 1.0, math.inf, 0.0]), torch.tensor([0, 2, 4])
    mask = torch.tensor([False, True, False, True])
    assert reinforce_pp(rewards, mask, cu_seqlens, gamma=1.0)[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"reward of token 2 \(sequence 1\) is inf"):
        reinforce_pp(rewards, torch.tensor([False, True, True, True]), cu_seqlens, gamma=1.0)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3]])
def test_answers_without_tokens_have_no_advantages(lengths):
    nothing, cu_seqlens = torch.ones(sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
    advantages, returns = reinforce_pp(nothing, nothing > 1, cu_seqlens, gamma=1.0)
    assert advantages.tolist() == returns.tolist() == [0.0] * sum(lengths)


@pytest.mark.parametrize("gamma", [1.1, -0.1, math.nan])
def test_a_discount_outside_0_to_1_is_named(gamma):
    one = torch.ones(1)
    with pytest.raises(ValueError, match="gamma must lie in"):
        reinforce_pp(one, one.bool(), torch.tensor([0, 1]), gamma=gamma)


def test_a_term_that_is_no_number_stays_within_its_sequence():
    terms, ids = torch.tensor([1.0, 2.0, math.nan, 4.0, 1.0]), torch.tensor([0, 0, 1, 1, 2])
    sums = discounted_sum(terms, ids, decay=1.0)
    assert sums[:2].tolist() == [3.0, 2.0] and math.isnan(sums[2]) and sums[3:].tolist() == [4.0, 1.0]
