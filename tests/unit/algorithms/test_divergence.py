"""The estimators against their formulas in Python floats, and against the exact divergence of two distributions."""

import math

import pytest
import torch

from rlmegatron.algorithms.divergence import divergence

FORMULAS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "k3_unbiased": lambda d: math.exp(-d) - 1 + d,
}


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_each_estimator_is_its_formula(estimator):
    logp, ref_logp = [-1.0, -0.5, -7.0, -3.0], [-1.0, -2.5, -0.25, -3.5]
    found = divergence(doubles(*logp), doubles(*ref_logp), estimator)
    expected = [FORMULAS[estimator](a - b) for a, b in zip(logp, ref_logp, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_k3_unbiased_is_weighted_by_the_ratio_to_the_old_policy():
    logp, ref_logp, old_logp = [-1.0, -0.5, -7.0], [-1.5, -2.5, -0.25], [-2.0, -0.5, -6.0]
    found = divergence(doubles(*logp), doubles(*ref_logp), "k3_unbiased", doubles(*old_logp))
    rows = zip(logp, ref_logp, old_logp, strict=True)
    expected = [math.exp(a - c) * FORMULAS["k3"](a - b) for a, b, c in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_the_other_estimators_do_not_read_the_old_policy(estimator):
    logp, ref_logp = doubles(-1.0, -2.0), doubles(-3.0, -1.0)
    old_logp = doubles(math.nan, math.nan)
    assert divergence(logp, ref_logp, estimator, old_logp).equal(divergence(logp, ref_logp, estimator))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    policy, reference = doubles(0.5, 0.3, 0.2), doubles(0.2, 0.2, 0.6)
    exact = sum(p * math.log(p / q) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    assert float((policy * divergence(policy.log(), reference.log(), estimator)).sum()) == pytest.approx(exact)


def enumerated(estimator, *, on_policy):
    """Means over all tokens that the old policy may draw: the estimate, and its gradient by the policy's logits.

    With both for the divergence itself, by its definition.
    """
    logits = doubles(1.0, -0.5, 0.3, 0.2).requires_grad_()
    reference, old = doubles(-1.0, 0.5, 0.0, 0.9).log_softmax(0), doubles(0.2, 1.4, -0.9, 0.6).log_softmax(0)
    logp = logits.log_softmax(0)
    if on_policy:
        old = logp.detach()
    exact = (logp.exp() * (logp - reference)).sum()
    mean = (old.exp() * divergence(logp, reference, estimator, old)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(mean, logits)
    return mean.item(), gradient, exact.item(), exact_gradient


@pytest.mark.parametrize("on_policy", [True, False])
def test_k3_unbiased_has_the_divergence_and_its_gradient_as_means(on_policy):
    mean, gradient, exact, exact_gradient = enumerated("k3_unbiased", on_policy=on_policy)
    assert mean == pytest.approx(exact, rel=1e-12)
    assert gradient.tolist() == pytest.approx(exact_gradient.tolist(), rel=1e-12)


def test_plain_k3_has_another_gradient_even_on_policy():
    """On-policy its value is right and its gradient is that of the divergence's other direction."""
    mean, gradient, exact, exact_gradient = enumerated("k3", on_policy=True)
    assert mean == pytest.approx(exact, rel=1e-12)
    assert (gradient - exact_gradient).abs().max() > 0.1
    mean, gradient, exact, exact_gradient = enumerated("k3", on_policy=False)
    assert abs(mean - exact) > 0.05 and (gradient - exact_gradient).abs().max() > 0.1


def test_k2_has_the_divergences_gradient_on_policy_and_k1_none():
    _, gradient, _, exact_gradient = enumerated("k2", on_policy=True)
    assert gradient.tolist() == pytest.approx(exact_gradient.tolist(), rel=1e-12)
    assert enumerated("k1", on_policy=True)[1].tolist() == pytest.approx([0.0] * 4, abs=1e-15)


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3", "k3_unbiased"])
def test_every_gradient_points_home(estimator):
    """Pulling one token's log-probability down or up must follow the sign of logp - ref_logp."""
    logp = doubles(-1.0, -3.0).requires_grad_()
    divergence(logp, doubles(-2.0, -2.0), estimator, doubles(-2.5, -2.5)).sum().backward()
    assert logp.grad is not None and logp.grad[0] > 0 > logp.grad[1]


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("distance", [-1000.0, -50.0, 50.0, 1000.0])
def test_far_policies_give_finite_values_and_gradients(estimator, distance):
    logp = torch.tensor([-1.0], requires_grad=True)
    value = divergence(logp, torch.tensor([-1.0 - distance]), estimator)
    value.sum().backward()
    assert value.isfinite().all() and logp.grad is not None and logp.grad.isfinite().all()


@pytest.mark.parametrize("log_ratio", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("distance", [-50.0, -1e-6, 1e-6, 50.0])
def test_the_gradient_of_k3_unbiased_is_exact_where_the_product_rule_loses_it(log_ratio, distance):
    """r d in single precision, where e^-d is 5e21 or 1 to the last digits; none where r itself is cut."""
    logp = torch.zeros(1, requires_grad=True)
    value = divergence(logp, torch.tensor([-distance]), "k3_unbiased", torch.tensor([-log_ratio]))
    value.sum().backward()
    assert value.isfinite().all() and logp.grad is not None
    assert float(logp.grad) == pytest.approx(distance if log_ratio == 0 else 0.0, rel=1e-6)


def test_k3_keeps_its_digits_where_policies_nearly_agree():
    """exp(-d) - 1 + d in fp32 has an error of 6e-8 here, thirteen times the answer 5e-9."""
    found = float(divergence(torch.tensor([1e-4]), torch.tensor([0.0]), "k3"))
    assert found == pytest.approx(0.5e-8, rel=1e-2)


@pytest.mark.parametrize("estimator", FORMULAS)
def test_gradients_match_finite_differences(estimator):
    logp = doubles(-1.0, -0.5, -7.0).requires_grad_()
    ref_logp, old_logp = doubles(-1.5, -2.5, -0.25), doubles(-2.0, -0.4, -6.0)
    assert torch.autograd.gradcheck(lambda x: divergence(x, ref_logp, estimator, old_logp), (logp,))


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="divergence estimator 'k4': unknown; use k1, abs, k2, k3, k3_unbiased"):
        divergence(torch.zeros(1), torch.zeros(1), "k4")
