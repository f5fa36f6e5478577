"""Owns giving advantages mean 0 and standard deviation 1 over the whole global batch.

In: per-token tensors of one rank, and moments that the caller has summed over all ranks; out: moments [3], or the
whitened tensor. Must never import torch.distributed: the sum over ranks is the caller's one all-reduce.
"""

# T tokens of all sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def masked_moments(x: Tensor, mask: Tensor) -> Tensor:
    """(count, sum, sum of squares) of the counted entries; add those of several ranks to get the whole batch's.

    x: [T], mask: [T] bool. Returns [3] float64.

    >>> masked_moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False])).tolist()
    [2.0, 4.0, 10.0]
    """
    expect("T", x=x, mask=mask)
    kept = x[mask].double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


def mean_and_variance(moments: Tensor) -> tuple[float, float]:
    """Mean and unbiased variance of summed `masked_moments` [3]; (0, 0) for no entry, variance 0 for one.

    A variance of at most 2e-15 of the mean square is 0: it is the rounding of these sums, and the last bit of float32
    entries shows more.

    >>> mean_and_variance(torch.tensor([2.0, 4.0, 10.0]))
    (2.0, 2.0)
    """
    expect("3", moments=moments)
    count, total, total_sq = moments.tolist()
    if count < 1:
        return 0.0, 0.0
    mean = total / count
    spread = total_sq - count * mean * mean
    return mean, 0.0 if spread <= 2e-15 * total_sq else spread / max(count - 1, 1)


@torch.no_grad()
def whiten(advantages: Tensor, mask: Tensor, *, mean: float, var: float) -> Tensor:
    """(advantages - mean) / sqrt(var + 1e-8) where counted, 0 elsewhere (TRL's and verl's `masked_whiten`).

    With var 0 all are equal and say nothing: exactly 0, not the rounding of their mean over 1e-4.

    advantages: [T], mask: [T] bool, mean and var: of the whole global batch. Returns [T], dtype of `advantages`.
    Raises ValueError for a negative var.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), mean=2.0, var=4.0).tolist()
    [-0.5, 0.5, 0.0]
    """
    expect("T", advantages=advantages, mask=mask)
    if var < 0:
        raise ValueError(f"var must not be negative, got {var}")
    if var == 0:
        return torch.zeros_like(advantages)
    scaled = (advantages.double() - mean) / (var + 1e-8) ** 0.5
    return torch.where(mask, scaled, 0.0).to(advantages.dtype)
