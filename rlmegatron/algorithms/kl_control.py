"""Owns how the weight of the divergence from the reference follows a target.

In: the weight, what was measured, what is wanted; out: the next weight. Must never import torch or the configuration.
"""

from __future__ import annotations

import math

MOST_ERROR = 0.2
"""How far from its target a divergence is taken to be, as a share of the target."""


def adapted(coef: float, *, measured: float, target: float, num_samples: int, horizon: int) -> float:
    """coef (1 + clip(measured / target - 1, -0.2, 0.2) num_samples / horizon) (arXiv 1909.08593, sec. 2.2).

    num_samples / horizon is the paper's K (0.1 there), as in its code, TRL and verl.
    measured, target: divergence in the same unit. num_samples: answers that `measured` was taken from. horizon: answers
    over which the weight may change by a factor of about e^0.2. Raises ValueError for a measured divergence that is not
    finite, a target or horizon that is not positive, and for num_samples of 5 horizons or more, where the weight could
    become negative.

    >>> round(adapted(0.1, measured=3.0, target=2.0, num_samples=64, horizon=128), 6)  # clipped: 0.2, not 0.5
    0.11
    >>> round(adapted(0.1, measured=1.8, target=2.0, num_samples=64, horizon=64), 6)
    0.09
    """
    if not math.isfinite(measured):
        raise ValueError(f"cannot adapt the divergence's coefficient: the measured divergence is {measured}")
    if not (target > 0 and horizon > 0):
        raise ValueError(f"target and horizon must be positive, got {target} and {horizon}")
    if not 0 <= num_samples * MOST_ERROR < horizon:
        raise ValueError(f"horizon must be more than {MOST_ERROR} x the {num_samples} samples of a step, got {horizon}")
    error = min(max(measured / target - 1, -MOST_ERROR), MOST_ERROR)
    return coef * (1 + error * num_samples / horizon)
