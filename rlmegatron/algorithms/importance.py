"""Owns the correction for engines that sample with other probabilities than the learner computes for the same weights.

In: log-probabilities of the sampled tokens by learner and engine; out: a weight per token, to be multiplied into the
loss, and which tokens remain. Must never import torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmegatron.algorithms.loss_term import Stat, max_stat, mean_stat, min_stat
from rlmegatron.algorithms.ragged import counted_per_sequence, sequence_ids
from rlmegatron.algorithms.ratio import bounded_exp, sequence_log_ratio
from rlmegatron.algorithms.shapes import expect

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


@dataclass(frozen=True, slots=True)
class Importance:
    """weights: [T] float32, 0 where not kept; kept: [T] bool, a part of the mask; stats: see `importance_weights`."""

    weights: Tensor
    kept: Tensor
    stats: Mapping[str, Stat]


@torch.no_grad()
def importance_weights(
    old_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: str,
    mode: str,
    low: float,
    high: float,
) -> Importance:
    """Weight of every counted token: the probability ratio learner / engine, made harmless where it is extreme.

    level: 'token' takes each token's own ratio exp(old_logp - rollout_logp), 'sequence' the product of its answer's
    ratios, 'geometric' their geometric mean; logs are cut to [-20, 20].
    mode: 'truncate' cuts ratios at `high` (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training"; `low` is not read), 'mask' keeps ratios within [low, high] and leaves out the other tokens (IcePop,
    arXiv 2510.18855) or whole answers (Liu, Li et al. 2025, "When Speed Kills Stability"). A ratio that is NaN is kept,
    so that it is seen.

    old_logp, rollout_logp: [T] nats, may be anything where the mask is False. mask: [T] bool. cu_seqlens: [N+1]; a
    sequence must not be cut over micro-batches.
    Stats, over counted tokens, or over answers with any for the levels of answers: ratio_mean, ratio_max, ratio_min
    (before truncating or masking), truncated_fraction or masked_fraction. Over tokens at every level: kl, the mean of
    rollout_logp - old_logp, which estimates KL(engine || learner).
    Raises ValueError for an unknown level or mode and for bounds that keep nothing.

    >>> learner, engine = torch.tensor([0.5, 0.1, 0.9]).log(), torch.tensor([0.25, 0.5, 0.3]).log()
    >>> mask, cu_seqlens = torch.tensor([True, True, True]), torch.tensor([0, 2, 3])
    >>> for level in ("token", "sequence"):  # ratios 2, 0.2, 3, and 0.4, 3
    ...     found = importance_weights(learner, engine, mask, cu_seqlens, level=level, mode="mask", low=0.3, high=2.5)
    ...     [round(weight, 4) for weight in found.weights.tolist()], found.kept.tolist()
    ([2.0, 0.0, 0.0], [True, False, False])
    ([0.4, 0.4, 0.0], [True, True, False])
    """
    _check(level, mode, low, high)
    (num_tokens,) = expect("T", old_logp=old_logp, rollout_logp=rollout_logp, mask=mask)
    log_ratio = torch.where(mask, old_logp.double() - rollout_logp.double(), 0.0)
    if level == "token":
        ratio, counted = bounded_exp(log_ratio), mask
    else:
        ratio = bounded_exp(sequence_log_ratio(log_ratio, mask, cu_seqlens, mean=level == "geometric"))
        counted = counted_per_sequence(mask, cu_seqlens) > 0
    # NaN is on neither side.
    extreme = ratio > high if mode == "truncate" else (ratio > high) | (ratio < low)
    weight = ratio.clamp(max=high) if mode == "truncate" else ratio
    dropped = extreme & (mode == "mask")
    stats = {
        "ratio_mean": mean_stat(ratio, counted),
        "ratio_max": max_stat(ratio, counted),
        "ratio_min": min_stat(ratio, counted),
        "truncated_fraction" if mode == "truncate" else "masked_fraction": mean_stat(extreme, counted),
        "kl": mean_stat(-log_ratio, mask),
    }
    if level != "token":
        ids = sequence_ids(cu_seqlens, num_tokens)
        weight, dropped = weight[ids], dropped[ids]
    kept = mask & ~dropped
    return Importance(torch.where(kept, weight, 0.0).float(), kept, stats)


def _check(level: str, mode: str, low: float, high: float) -> None:
    if level not in LEVELS:
        raise ValueError(f"importance level {level!r}: unknown; use {', '.join(LEVELS)}")
    if mode not in MODES:
        raise ValueError(f"importance mode {mode!r}: unknown; use {', '.join(MODES)}")
    if not high > 0:
        raise ValueError(f"importance: high must be positive, got {high}")
    if mode == "mask" and not 0 <= low <= high:
        raise ValueError(f"importance: low must be between 0 and high ({high}), got {low}")
