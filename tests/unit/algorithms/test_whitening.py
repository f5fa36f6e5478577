"""Whitening uses the moments of the whole batch, so its result does not depend on how the batch is cut."""

import math

import pytest
import torch

from rlmegatron.algorithms.whitening import masked_moments, mean_and_variance, whiten


def test_moments_of_parts_add_up_to_numpy_style_statistics():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(50) % 3 != 0
    moments = masked_moments(x[:20], mask[:20]) + masked_moments(x[20:], mask[20:])
    mean, var = mean_and_variance(moments)
    assert (mean, var) == pytest.approx((float(x[mask].mean()), float(x[mask].var(unbiased=True))), rel=1e-12)


def test_whitened_advantages_have_mean_0_and_deviation_1_in_any_cut():
    x = 5 + 3 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(40) % 4 != 1
    x[~mask] = math.nan
    mean, var = mean_and_variance(masked_moments(x, mask))
    whole = whiten(x, mask, mean=mean, var=var)
    parts = torch.cat([whiten(x[:7], mask[:7], mean=mean, var=var), whiten(x[7:], mask[7:], mean=mean, var=var)])
    assert torch.equal(whole, parts)
    assert float(whole[mask].mean()) == pytest.approx(0, abs=1e-6)
    assert float(whole[mask].std()) == pytest.approx(1, abs=1e-6)
    assert whole[~mask].tolist() == [0.0] * int((~mask).sum())


@pytest.mark.parametrize("count", [0, 1, 5, 4999])
@pytest.mark.parametrize("value", [0.1, -1 / 3, 777.7])
def test_advantages_that_are_all_equal_become_exactly_0_in_any_cut(count, value):
    """Over 1e-4, the rounding of their mean would be an advantage."""
    x, mask = torch.full((5000,), value), torch.arange(5000) < count
    mean, var = mean_and_variance(masked_moments(x[:1700], mask[:1700]) + masked_moments(x[1700:], mask[1700:]))
    assert var == 0.0
    assert whiten(x, mask, mean=mean, var=var).tolist() == [0.0] * 5000


def test_the_smallest_spread_that_float32_shows_is_whitened():
    x, every = torch.tensor([1.0, 1.0 + 2**-23] * 50), torch.ones(100, dtype=torch.bool)
    _, var = mean_and_variance(masked_moments(x, every))
    assert var == pytest.approx(float(x.double().var()), rel=0.1)


def test_a_negative_variance_is_refused():
    with pytest.raises(ValueError, match="var must not be negative"):
        whiten(torch.zeros(1), torch.ones(1, dtype=torch.bool), mean=0.0, var=-1.0)
