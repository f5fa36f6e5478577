"""Terms of a loss add up, their statistics merge, and the added terms have the right sign."""

import math

import pytest
import torch

from rlmegatron.algorithms.loss_term import LossTerm, max_stat, mean_stat
from rlmegatron.algorithms.regularizers import entropy_bonus, kl_penalty

WEIGHTS = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)


def test_the_entropy_bonus_raises_entropy():
    entropy = torch.tensor([1.0, math.nan, 4.0], dtype=torch.float64, requires_grad=True)
    term = entropy_bonus(entropy=entropy, weights=WEIGHTS, coef=0.1)
    term.total.backward()
    assert term.total.item() == pytest.approx(-0.1 * (1.0 + 0.5 * 4.0))
    assert entropy.grad is not None and entropy.grad.tolist() == pytest.approx([-0.1, 0.0, -0.05])
    assert term.stats["entropy"].parts.tolist() == [5.0, 2.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_penalty_is_its_formula(estimator):
    logp = torch.tensor([-1.0, math.nan, -3.0], dtype=torch.float64, requires_grad=True)
    ref_logp = torch.tensor([-2.0, -1.0, -2.5], dtype=torch.float64)
    term = kl_penalty(logp=logp, ref_logp=ref_logp, weights=WEIGHTS, estimator=estimator, coef=0.3)
    term.total.backward()
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    slope = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}[estimator]
    assert term.total.item() == pytest.approx(0.3 * (formula(1.0) + 0.5 * formula(-0.5)))
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.3 * slope(1.0), 0.0, 0.15 * slope(-0.5)])
    assert term.stats["kl_ref"].parts.tolist() == pytest.approx([formula(1.0) + formula(-0.5), 2.0])


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
    for of in (mean_stat, max_stat):
        merged = of(x[:1], counted[:1]).merge(of(x[1:], counted[1:]))
        assert merged.parts.tolist() == of(x, counted).parts.tolist()
    assert mean_stat(x, counted).parts.tolist() == [-2.0, 3.0]
    assert max_stat(x, counted).parts.tolist() == [2.0]


def test_a_loss_term_without_statistics_is_allowed():
    assert LossTerm(torch.ones(())).stats == {}
