"""Owns the losses of the critic.

In: per-token values, returns and weights of one micro-batch; out: a `LossTerm`, whose total is a sum. Must never
import torch.distributed or the configuration.
"""

# T tokens

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm, mean_stat, weighted_sum
from rlmegatron.algorithms.shapes import expect


def clipped_value(
    *, values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, value_clip: float | None
) -> LossTerm:
    """Sum of w/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), as in PPO2 (OpenAI baselines), TRL and verl.

    `value_clip` None leaves the plain w/2 (V - R)^2. Tokens of weight 0 may hold anything, NaN included.

    values (with gradient), old_values (before this rollout batch's updates), returns: [T]. weights: [T] from
    `token_weights`. Stats over counted tokens: clip_fraction (where the clip decides), value_mean, return_mean.

    >>> term = clipped_value(values=torch.tensor([1.0]), old_values=torch.tensor([0.0]), returns=torch.tensor([2.0]),
    ...                      weights=torch.ones(1), value_clip=0.5)
    >>> float(term.total)
    1.125
    """
    expect("T", values=values, old_values=old_values, returns=returns, weights=weights)
    counted = weights > 0
    values = torch.where(counted, values, torch.zeros_like(values))
    returns = torch.where(counted, returns, torch.zeros_like(returns))
    squared = (values - returns).square()
    worst, binds = squared, torch.zeros_like(counted)
    if value_clip is not None:
        anchor = torch.where(counted, old_values, torch.zeros_like(old_values))
        near = torch.minimum(torch.maximum(values, anchor - value_clip), anchor + value_clip)
        squared_near = (near - returns).square()
        worst, binds = torch.maximum(squared, squared_near), squared_near > squared
    stats = {
        "clip_fraction": mean_stat(binds.double(), counted),
        "value_mean": mean_stat(values, counted),
        "return_mean": mean_stat(returns, counted),
    }
    return LossTerm(0.5 * weighted_sum(worst, weights), stats)
