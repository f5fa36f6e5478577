"""Terms of a loss add up, their statistics merge, and the added terms have the right sign."""

import math

import pytest
import torch

from rlmegatron.algorithms.loss_term import LossTerm, max_stat, mean_stat, min_stat
from rlmegatron.algorithms.regularizers import entropy_bonus, kl_penalty

WEIGHTS = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)


def test_the_entropy_bonus_raises_entropy():
    entropy = torch.tensor([1.0, math.nan, 4.0], dtype=torch.float64, requires_grad=True)
    term = entropy_bonus(entropy=entropy, weights=WEIGHTS, coef=0.1)
    term.total.backward()
    assert term.total.item() == pytest.approx(-0.1 * (1.0 + 0.5 * 4.0))
    assert entropy.grad is not None and entropy.grad.tolist() == pytest.approx([-0.1, 0.0, -0.05])
    assert term.stats["entropy"].parts.tolist() == [5.0, 2.0]


@pytest.mark.parametrize(
    ("estimator", "formula", "slope"),
    [
        ("k1", lambda d, r: d, lambda d, r: 1.0),
        ("abs", lambda d, r: abs(d), lambda d, r: math.copysign(1.0, d)),
        ("k2", lambda d, r: d * d / 2, lambda d, r: d),
        ("k3", lambda d, r: math.exp(-d) - 1 + d, lambda d, r: 1 - math.exp(-d)),
        ("k3_unbiased", lambda d, r: r * (math.exp(-d) - 1 + d), lambda d, r: r * d),
    ],
)
def test_the_kl_penalty_is_its_formula(estimator, formula, slope):
    """d = 1 and -0.5, the ratios to the old policy are 2 and 0.5."""
    logp = torch.tensor([-1.0, math.nan, -3.0], dtype=torch.float64, requires_grad=True)
    ref_logp = torch.tensor([-2.0, math.nan, -2.5], dtype=torch.float64)
    old_logp = torch.tensor([-1.0 - math.log(2), math.nan, -3.0 + math.log(2)], dtype=torch.float64)
    term = kl_penalty(logp=logp, ref_logp=ref_logp, old_logp=old_logp, weights=WEIGHTS, estimator=estimator, coef=0.3)
    term.total.backward()
    values, slopes = ([of(1.0, 2.0), of(-0.5, 0.5)] for of in (formula, slope))
    assert term.total.item() == pytest.approx(0.3 * (values[0] + 0.5 * values[1]))
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.3 * slopes[0], 0.0, 0.15 * slopes[1]])
    assert term.stats["kl_ref"].parts.tolist() == pytest.approx([sum(values), 2.0])


def test_the_unbiased_estimator_as_a_loss_needs_the_old_policy():
    with pytest.raises(ValueError, match="'k3_unbiased' needs old_logp"):
        kl_penalty(logp=WEIGHTS, ref_logp=WEIGHTS, weights=WEIGHTS, estimator="k3_unbiased", coef=1.0)


def test_terms_add_and_keep_every_statistic():
    kl = kl_penalty(logp=WEIGHTS, ref_logp=0 * WEIGHTS, weights=WEIGHTS, estimator="k1", coef=1.0)
    both = kl + entropy_bonus(entropy=WEIGHTS, weights=WEIGHTS, coef=1.0)
    assert both.total.item() == 0.0
    assert set(both.stats) == {"kl_ref", "entropy"}


def test_two_statistics_of_one_name_are_refused():
    term = entropy_bonus(entropy=WEIGHTS, weights=WEIGHTS, coef=1.0)
    with pytest.raises(ValueError, match="the same statistic: entropy"):
        term + term


def test_statistics_of_micro_batches_merge_to_those_of_the_whole():
    x, counted = torch.tensor([1.0, -5.0, 7.0, 2.0]), torch.tensor([True, True, False, True])
    for of in (mean_stat, max_stat, min_stat):
        merged = of(x[:1], counted[:1]).merge(of(x[1:], counted[1:]))
        assert merged.parts.tolist() == of(x, counted).parts.tolist()
    assert mean_stat(x, counted).parts.tolist() == [-2.0, 3.0]
    assert max_stat(x, counted).parts.tolist() == [2.0]
    assert min_stat(x, counted).parts.tolist() == [-5.0]


def test_the_extremes_of_nothing_lose_against_any_number():
    x, nothing = torch.tensor([math.nan]), torch.tensor([False])
    for of in (max_stat, min_stat):
        assert of(x, nothing).merge(of(torch.tensor([3.0]), ~nothing)).parts.tolist() == [3.0]
        assert of(x[:0], nothing[:0]).parts.equal(of(x, nothing).parts)


def test_a_loss_term_without_statistics_is_allowed():
    assert LossTerm(torch.ones(())).stats == {}
