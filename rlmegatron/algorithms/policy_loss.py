"""Owns the losses that turn advantages into gradients of the policy.

In: per-token log-probabilities, advantages and weights of one micro-batch; out: a `LossTerm`, whose total is a sum.
Must never import torch.distributed or the configuration.
"""

# T tokens

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.divergence import MAX_LOG_RATIO, divergence
from rlmegatron.algorithms.loss_term import LossTerm, Stat, max_stat, mean_stat, weighted_sum
from rlmegatron.algorithms.shapes import expect


def ppo_clip(
    *, logp: Tensor, old_logp: Tensor, advantages: Tensor, weights: Tensor, clip_low: float, clip_high: float
) -> LossTerm:
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7): sum of w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    r = exp(logp - old_logp). As in verl the log-ratio is cut to [-20, 20] first, so loss and gradient stay finite; a
    token outside has no gradient. Tokens of weight 0 may hold anything, NaN included. Different clip distances are
    DAPO's clip-higher (arXiv 2503.14476, eq. 10).

    logp (with gradient), old_logp: [T] nats. advantages: [T]. weights: [T] from `token_weights`.
    Stats over counted tokens: clip_fraction (where the clip decides), approx_kl (k3 of the old policy from the new),
    approx_kl_k1 (mean of old_logp - logp), ratio_mean, ratio_max.

    >>> logp, old_logp = torch.tensor([0.5, 1.5]).log(), torch.tensor([1.0, 1.0]).log()
    >>> term = ppo_clip(logp=logp, old_logp=old_logp, advantages=torch.tensor([1.0, 1.0]),
    ...                 weights=torch.ones(2), clip_low=0.2, clip_high=0.2)
    >>> round(float(term.total), 4), term.stats["clip_fraction"].parts.tolist()
    (-1.7, [1.0, 2.0])
    """
    expect("T", logp=logp, old_logp=old_logp, advantages=advantages, weights=weights)
    counted = weights > 0
    log_ratio = torch.where(counted, logp - old_logp, torch.zeros_like(logp))
    advantages = torch.where(counted, advantages, torch.zeros_like(advantages))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    stats = _ratio_stats(log_ratio.detach(), ratio.detach(), counted)
    stats["clip_fraction"] = mean_stat((clipped > unclipped).double(), counted)
    return LossTerm(weighted_sum(torch.maximum(unclipped, clipped), weights), stats)


def _ratio_stats(log_ratio: Tensor, ratio: Tensor, counted: Tensor) -> dict[str, Stat]:
    # The tokens were drawn from the old policy, so KL(old || new) is what they estimate: old comes first.
    return {
        "approx_kl": mean_stat(divergence(-log_ratio, torch.zeros_like(log_ratio), "k3"), counted),
        "approx_kl_k1": mean_stat(-log_ratio, counted),
        "ratio_mean": mean_stat(ratio, counted),
        "ratio_max": max_stat(ratio, counted),
    }
