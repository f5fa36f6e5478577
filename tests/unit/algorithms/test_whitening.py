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


@pytest.mark.parametrize("count", [0, 1, 5])
def test_advantages_that_are_all_equal_become_zero(count):
    x = torch.full((5,), 0.1)
    mask = torch.arange(5) < count
    mean, var = mean_and_variance(masked_moments(x, mask))
    assert whiten(x, mask, mean=mean, var=var).tolist() == pytest.approx([0.0] * 5, abs=1e-6)
    assert var == pytest.approx(0, abs=1e-15)


def test_a_negative_variance_is_refused():
    with pytest.raises(ValueError, match="var must not be negative"):
        whiten(torch.zeros(1), torch.ones(1, dtype=torch.bool), mean=0.0, var=-1.0)
