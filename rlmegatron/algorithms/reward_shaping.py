"""Owns what happens to the rewards of a step between being judged and being credited to tokens.

In: one reward per sample of the WHOLE step; out: one per sample, for the advantages alone: files and metrics keep the
rewards as they were judged. Must never import torch.distributed or the configuration.
"""

# N samples of the step

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.finite import check_rewards
from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def shape_rewards(rewards: Tensor, *, clip: tuple[float, float] | None, whiten: bool) -> Tensor:
    """Cut rewards to [low, high], then give them mean 0 and standard deviation 1 over the step; either may be left out.

    Whitened is (r - mean) / sqrt(var + 1e-8) with the unbiased variance (n - 1), as TRL's and verl's `masked_whiten`
    does; exactly 0 when all rewards are equal, and for a single sample.

    rewards: [N] floating, any unit. clip: (low, high) in that unit, or None. Returns [N] in the dtype of `rewards`,
    computed in float64, permuted exactly when the batch is permuted. Raises ValueError unless low <= high, and for a
    reward that is not finite, also one that clipping would make finite; it names the sample.

    >>> shape_rewards(torch.tensor([-9.0, 1.0, 3.0]), clip=(-2.0, 2.0), whiten=False).tolist()
    [-2.0, 1.0, 2.0]
    >>> [round(r, 4) for r in shape_rewards(torch.tensor([1.0, 2.0, 3.0]), clip=None, whiten=True).tolist()]
    [-1.0, 0.0, 1.0]
    """
    expect("N", rewards=rewards)
    check_rewards(rewards)
    shaped = rewards.double()
    if clip is not None:
        low, high = clip
        if not low <= high:
            raise ValueError(f"clip must be (low, high) with low <= high, got ({low}, {high})")
        shaped = shaped.clamp(low, high)
    if whiten:
        shaped = _whitened(shaped)
    return shaped.to(rewards.dtype)


def _whitened(values: Tensor) -> Tensor:
    # Not `whitening`, whose moments are sums over ranks: with all rewards at hand two passes keep a small spread on a
    # large offset. In ascending order, so that no order of the batch changes how the sums are rounded.
    ascending = values.sort().values
    # A mean of equal numbers need not equal them in floating point.
    if not values.numel() or bool(ascending[0] == ascending[-1]):
        return torch.zeros_like(values)
    mean = ascending.mean()
    variance = (ascending - mean).square().sum() / (values.numel() - 1)
    return (values - mean) / (variance + 1e-8).sqrt()
