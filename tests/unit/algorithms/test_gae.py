"""GAE over ragged sequences against its definition as a double loop, and against TRL's padded recursion."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.gae import gae


def slow_gae(rewards, values, mask, cu_seqlens, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_t+l, from the definition, one counted token at a time."""
    advantages = [0.0] * len(rewards)
    for start, end in pairwise(cu_seqlens):
        at = [t for t in range(start, end) if mask[t]]
        for i in range(len(at)):
            for ahead in range(i, len(at)):
                following = values[at[ahead + 1]] if ahead + 1 < len(at) else 0.0
                delta = rewards[at[ahead]] + gamma * following - values[at[ahead]]
                advantages[at[i]] += (gamma * lam) ** (ahead - i) * delta
    return advantages


def padded_gae(rewards, values, gamma, lam):
    """TRL's PPOTrainer for one answer without padding: a recursion from the last token."""
    last, reversed_advantages = 0.0, []
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1] if t < len(rewards) - 1 else 0.0
        last = rewards[t] + gamma * next_value - values[t] + gamma * lam * last
        reversed_advantages.append(last)
    return reversed_advantages[::-1]


@given(st.lists(st.integers(0, 9), max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_gae_is_its_definition(lengths, gamma, lam, seed):
    rng = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    rewards, values = (torch.randn(num_tokens, generator=rng, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(num_tokens, generator=rng) < 0.7
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    advantages, returns = gae(rewards, values, mask, cu_seqlens, gamma=gamma, lam=lam)
    expected = slow_gae(rewards.tolist(), values.tolist(), mask.tolist(), cu_seqlens.tolist(), gamma, lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    kept = [(a + v) if m else 0.0 for a, v, m in zip(expected, values.tolist(), mask.tolist(), strict=True)]
    assert returns.tolist() == pytest.approx(kept, abs=1e-9)


def test_gae_is_the_padded_recursion_of_trl():
    rng = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(33, generator=rng).double(), torch.randn(33, generator=rng).double()
    every = torch.ones(33, dtype=torch.bool)
    advantages, _ = gae(rewards, values, every, torch.tensor([0, 33]), gamma=0.99, lam=0.95)
    assert advantages.tolist() == pytest.approx(padded_gae(rewards.tolist(), values.tolist(), 0.99, 0.95), abs=1e-12)


def test_with_gamma_and_lambda_one_the_return_is_the_reward_to_come():
    rewards, values = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.3, -0.2, 0.9])
    every = torch.ones(3, dtype=torch.bool)
    _, returns = gae(rewards, values, every, torch.tensor([0, 3]), gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([1.5, 1.5, 1.0])


def test_neighbouring_sequences_and_the_prompt_do_not_leak():
    """A NaN anywhere but in the sequence itself must not reach it, nor one at a token that does not count."""
    rewards = torch.tensor([math.nan, 0.0, 1.0, 0.0, math.nan])
    values = torch.tensor([math.nan, 0.5, 0.25, math.nan, 0.0])
    mask = torch.tensor([False, True, True, True, False])
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 3, 5]), gamma=1.0, lam=0.5)
    assert advantages[:3].tolist() == [0.0, 0.125, 0.75]
    assert returns[:3].tolist() == [0.0, 0.625, 1.0]
    assert math.isnan(advantages[3]) and advantages[4] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_counted_reward_that_is_no_number_is_named(bad):
    rewards, values = torch.tensor([bad, 0.0, bad, 0.0]), torch.zeros(4)
    mask = torch.tensor([False, True, True, True])
    with pytest.raises(ValueError, match=rf"reward of token 2 \(sequence 1\) is {bad}"):
        gae(rewards, values, mask, torch.tensor([0, 2, 4]), gamma=1.0, lam=1.0)


def test_an_answer_of_200_000_tokens_is_as_exact_as_a_loop_in_float64():
    rng = torch.Generator().manual_seed(7)
    rewards, values = (torch.randn(200_000, generator=rng, dtype=torch.float64) for _ in range(2))
    every = torch.ones(200_000, dtype=torch.bool)
    advantages, _ = gae(rewards, values, every, torch.tensor([0, 200_000]), gamma=1.0, lam=0.9999)
    expected = padded_gae(rewards.tolist(), values.tolist(), 1.0, 0.9999)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-9)


def test_a_sequence_gets_the_same_bits_alone_and_in_company():
    rng = torch.Generator().manual_seed(8)
    rewards, values = (torch.randn(1060, generator=rng) for _ in range(2))
    mask, cu_seqlens = torch.rand(1060, generator=rng) < 0.8, torch.tensor([0, 17, 57, 60, 1060])
    packed, _ = gae(rewards, values, mask, cu_seqlens, gamma=0.99, lam=0.95)
    for start, end in pairwise(cu_seqlens.tolist()):
        part = slice(start, end)
        bounds = torch.tensor([0, end - start])
        assert torch.equal(gae(rewards[part], values[part], mask[part], bounds, gamma=0.99, lam=0.95)[0], packed[part])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_rounds_once_at_the_end(dtype):
    rng = torch.Generator().manual_seed(9)
    rewards, values = (torch.randn(90, generator=rng).to(dtype) for _ in range(2))
    every, cu_seqlens = torch.ones(90, dtype=torch.bool), torch.tensor([0, 60, 60, 90])
    low = gae(rewards, values, every, cu_seqlens, gamma=0.99, lam=0.95)
    exact = gae(rewards.double(), values.double(), every, cu_seqlens, gamma=0.99, lam=0.95)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(low, exact, strict=True))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [3]])
def test_answers_without_tokens_have_no_advantages(lengths):
    nothing = torch.zeros(sum(lengths))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    advantages, returns = gae(nothing, nothing + 1, nothing.bool(), cu_seqlens, gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [0.0] * sum(lengths)


@pytest.mark.parametrize(("gamma", "lam", "named"), [(1.1, 1.0, "gamma"), (1.0, -0.1, "lam"), (math.nan, 1.0, "gamma")])
def test_a_discount_outside_0_to_1_is_named(gamma, lam, named):
    one = torch.ones(1)
    with pytest.raises(ValueError, match=f"{named} must lie in"):
        gae(one, one, one.bool(), torch.tensor([0, 1]), gamma=gamma, lam=lam)
