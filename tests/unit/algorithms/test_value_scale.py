"""The running scale of returns against its formula as a loop, and that it stays the same however tokens are spread."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.value_scale import ReturnScale
from rlmegatron.algorithms.whitening import masked_moments

NONE = torch.zeros(3, dtype=torch.float64)


def moments(returns):
    x = torch.tensor(returns, dtype=torch.float64)
    return masked_moments(x, torch.ones_like(x, dtype=torch.bool))


def slow_scale(steps, decay):
    """A mean over steps in which the step k updates ago weighs decay^k: what debiasing amounts to."""
    weights = [decay ** (len(steps) - 1 - i) for i in range(len(steps))]
    mean = sum(w * sum(s) / len(s) for w, s in zip(weights, steps, strict=True)) / sum(weights)
    mean_sq = sum(w * sum(r * r for r in s) / len(s) for w, s in zip(weights, steps, strict=True)) / sum(weights)
    return mean, math.sqrt(max(mean_sq - mean * mean, 0.01))


@given(
    st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=6), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.5, 0.99, 0.99999]),
)
@settings(max_examples=100, deadline=None)
def test_it_is_the_weighted_mean_over_steps(steps, decay):
    scale = ReturnScale(decay=decay)
    for step in steps:
        scale = scale.update(moments(step))
    mean, std = slow_scale(steps, decay)
    assert scale.center == pytest.approx(mean, rel=1e-8, abs=1e-8)
    assert scale.std == pytest.approx(std, rel=1e-5)


def test_two_hand_worked_updates():
    scale = ReturnScale(decay=0.75).update(moments([1.0, 3.0]))
    # Debiased, the first step counts in full: mean 2, mean square 5, std 1.
    assert (scale.center, scale.std) == (2.0, 1.0)
    scale = scale.update(moments([10.0]))
    # Weights 3 : 4. Mean (6 + 40) / 7, mean square (15 + 400) / 7.
    assert scale.center == pytest.approx(46 / 7)
    assert scale.std == pytest.approx(math.sqrt(415 / 7 - (46 / 7) ** 2))


def test_before_the_first_update_it_changes_nothing():
    x = torch.tensor([-3.0, 0.1, 1e6])
    assert torch.equal(ReturnScale().normalize(x), x)
    assert torch.equal(ReturnScale().denormalize(x), x)


def test_denormalize_undoes_normalize():
    scale = ReturnScale().update(moments([-400.0, 100.0, 700.0]))
    x = torch.linspace(-1000, 1000, 41, dtype=torch.float64)
    assert torch.allclose(scale.denormalize(scale.normalize(x)), x, rtol=0, atol=1e-9)
    assert scale.normalize(x.float()).dtype == torch.float32


def test_normalised_returns_of_the_first_step_have_mean_0_and_deviation_1():
    returns = 500 + 30 * torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normalised = ReturnScale().update(moments(returns.tolist())).normalize(returns)
    assert float(normalised.mean()) == pytest.approx(0, abs=1e-9)
    assert float(normalised.std(unbiased=False)) == pytest.approx(1, abs=1e-9)


def test_equal_returns_meet_the_floor_of_the_deviation():
    scale = ReturnScale().update(moments([0.3] * 5))
    assert scale.std == pytest.approx(0.1)
    assert scale.normalize(torch.tensor([1.3])).tolist() == pytest.approx([10.0])


def test_the_moments_of_ranks_add_up_and_a_rank_without_tokens_adds_nothing():
    whole = ReturnScale().update(moments([1.0, 2.0, 6.0]))
    assert ReturnScale().update(moments([1.0]) + NONE + moments([2.0, 6.0])) == whole


def test_a_step_without_tokens_leaves_the_scale_as_it_is():
    scale = ReturnScale().update(moments([1.0, 2.0]))
    assert scale.update(NONE) == scale
    assert ReturnScale().update(NONE) == ReturnScale()


def test_a_gradient_passes_through():
    scale = ReturnScale().update(moments([0.0, 4.0]))
    x = torch.tensor([5.0], requires_grad=True)
    scale.normalize(x).sum().backward()
    assert x.grad.tolist() == [0.5]


def test_the_state_survives_json_exactly():
    scale = ReturnScale(decay=0.9).update(moments([0.1, 1 / 3])).update(moments([-7.7]))
    assert ReturnScale.from_state(json.loads(json.dumps(scale.state()))) == scale


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_returns_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="moments of returns must be finite"):
        ReturnScale().update(moments([1.0, bad]))


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan])
def test_a_decay_that_would_never_learn_is_refused(decay):
    with pytest.raises(ValueError, match="decay must lie in"):
        ReturnScale(decay=decay)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="state of a ReturnScale must have"):
        ReturnScale.from_state({"decay": 0.9, "mean": 0.0})
    with pytest.raises(ValueError, match="not a scale"):
        ReturnScale.from_state(ReturnScale().state() | {"mean": math.nan})
