"""Owns the per-token estimators of the divergence KL(policy || reference) from samples of the policy.

In: log-probabilities of the same tokens under both; out: nats per token. Must never import torch.distributed or the
configuration.
"""

# T tokens

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlmegatron.algorithms.shapes import expect

MAX_LOG_RATIO = 20.0
"""Where a log-ratio is cut before it is exponentiated, as in verl; e^20 is 5e8, far from any float's limit."""


def divergence(logp: Tensor, ref_logp: Tensor, estimator: str) -> Tensor:
    """Divergence per token by the named estimator (Schulman 2020, "Approximating KL divergence").

    With d = logp - ref_logp: k1 = d (unbiased, may be negative), k2 = d^2 / 2, k3 = e^-d - 1 + d (unbiased, never
    negative). As a loss, k1 has a gradient of mean zero and so pulls nowhere; use k2 or k3 there. k3 sees d within
    [-20, 20] and has no gradient outside.

    logp, ref_logp: [T] nats. Returns [T] nats. Raises ValueError for an unknown estimator.

    >>> [round(float(divergence(torch.tensor([-1.0]), torch.tensor([-2.0]), k)), 4) for k in ("k1", "k2", "k3")]
    [1.0, 0.5, 0.3679]
    """
    expect("T", logp=logp, ref_logp=ref_logp)
    if estimator not in _ESTIMATORS:
        raise ValueError(f"divergence estimator {estimator!r}: unknown; use {', '.join(_ESTIMATORS)}")
    return _ESTIMATORS[estimator](logp - ref_logp)


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(-d) - 1 loses where the policies nearly agree.
    return torch.expm1(-bounded) + bounded


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
