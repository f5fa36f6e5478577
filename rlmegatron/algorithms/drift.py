"""Owns the statistics of how far an update has moved the policy from the one that it learns from.

In: log-probabilities of the same tokens under both; out: statistics, detached, for every policy loss alike. Must never
import torch.distributed or the configuration.
"""

# T tokens

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.divergence import divergence
from rlmegatron.algorithms.loss_term import Stat, max_stat, mean_stat
from rlmegatron.algorithms.ratio import bounded_exp
from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def drift_stats(logp: Tensor, old_logp: Tensor, counted: Tensor) -> dict[str, Stat]:
    """approx_kl and approx_kl_k1 of the old policy from the new, ratio_mean and ratio_max of new / old.

    The tokens were drawn from the old policy, so KL(old || new) is what they estimate (Schulman 2020): by k3 for
    approx_kl (never negative) and by k1, the mean of old_logp - logp, for approx_kl_k1.

    logp, old_logp: [T] nats, may be NaN where not counted. counted: [T] bool.

    >>> logp, old_logp = torch.tensor([0.5, 1.5]).log(), torch.tensor([1.0, 1.0]).log()
    >>> stats = drift_stats(logp, old_logp, torch.tensor([True, False]))
    >>> {name: [round(part, 4) for part in stat.parts.tolist()] for name, stat in stats.items()}
    {'approx_kl': [0.1931, 1.0], 'approx_kl_k1': [0.6931, 1.0], 'ratio_mean': [0.5, 1.0], 'ratio_max': [0.5]}
    """
    expect("T", logp=logp, old_logp=old_logp, counted=counted)
    log_ratio = torch.where(counted, logp - old_logp, torch.zeros_like(logp))
    ratio = bounded_exp(log_ratio)
    return {
        "approx_kl": mean_stat(divergence(-log_ratio, torch.zeros_like(log_ratio), "k3"), counted),
        "approx_kl_k1": mean_stat(-log_ratio, counted),
        "ratio_mean": mean_stat(ratio, counted),
        "ratio_max": max_stat(ratio, counted),
    }
