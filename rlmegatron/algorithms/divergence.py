"""Owns the per-token estimators of the divergence KL(policy || reference) from samples of the policy.

In: log-probabilities of the same tokens under both; out: nats per token. Must never import torch.distributed or the
configuration.
"""

# T tokens

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlmegatron.algorithms.ratio import MAX_LOG_RATIO, bounded_exp
from rlmegatron.algorithms.shapes import expect


def divergence(logp: Tensor, ref_logp: Tensor, estimator: str, old_logp: Tensor | None = None) -> Tensor:
    """Divergence per token by the named estimator (Schulman 2020, "Approximating KL divergence").

    With d = logp - ref_logp: k1 = d (unbiased, may be negative), abs = |d|, k2 = d^2 / 2, k3 = e^-d - 1 + d (unbiased,
    never negative). As a loss, k1 has a gradient of mean zero and so pulls nowhere, k2 has the divergence's gradient
    on-policy, and k3 that of KL(reference || policy). k3 sees d within [-20, 20] and has no gradient outside.

    k3_unbiased = r k3 with r = exp(logp - old_logp), for tokens drawn from the old policy (DeepSeek-V3.2, arXiv
    2512.02556, eq. 7). Through both factors its gradient is r d, which has the divergence's gradient as its mean; r is
    cut as in `ppo_clip`. Without old_logp, that is for tokens that the policy itself drew and no gradient, it is k3.

    logp, ref_logp, old_logp: [T] nats; old_logp is read by k3_unbiased only. Returns [T] nats. Raises ValueError for an
    unknown estimator.

    >>> logp, ref_logp = torch.tensor([-1.0]), torch.tensor([-2.0])
    >>> [round(float(divergence(logp, ref_logp, name)), 4) for name in ("k1", "abs", "k2", "k3")]
    [1.0, 1.0, 0.5, 0.3679]
    >>> float(divergence(logp, ref_logp, "k3_unbiased", old_logp=logp - 1))  # e * e^-1
    1.0
    """
    expect("T", logp=logp, ref_logp=ref_logp)
    if estimator not in _ESTIMATORS:
        raise ValueError(f"divergence estimator {estimator!r}: unknown; use {', '.join(_ESTIMATORS)}")
    if estimator == "k3_unbiased" and old_logp is not None:
        expect("T", logp=logp, old_logp=old_logp)
        return _weighted_k3(logp - ref_logp, logp - old_logp)
    return _ESTIMATORS[estimator](logp - ref_logp)


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(-d) - 1 loses where the policies nearly agree.
    return torch.expm1(-bounded) + bounded


def _weighted_k3(log_ratio: Tensor, log_weight: Tensor) -> Tensor:
    """exp(log_weight) * k3, with the gradient exp(log_weight) * log_ratio of a logp that is in both.

    That gradient is written down rather than left to the product rule, which finds it as the difference of two numbers
    of the size of e^-log_ratio: digits are lost where the policies disagree, and all of them where k3 is cut.
    """
    weight = bounded_exp(log_weight.detach())
    slope = weight * log_ratio.detach()
    bounded = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return weight * _k3(log_ratio.detach()) + slope * (bounded - bounded.detach())


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "abs": torch.abs,
    "k2": _k2,
    "k3": _k3,
    "k3_unbiased": _k3,
}
