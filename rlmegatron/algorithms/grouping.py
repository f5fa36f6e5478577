"""Owns the arithmetic of groups: which samples share a prompt, sums over them, and rewards less their group's baseline.

In: one number and one group id per sample, in any order; out: float64, the same for any order of the samples to the
last bit. Must never import torch.distributed or the configuration.
"""

# N samples of the global batch, G groups

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmegatron.algorithms.finite import check_rewards
from rlmegatron.algorithms.shapes import expect


@dataclass(frozen=True, slots=True)
class CentredRewards:
    """Rewards less the baseline of their group, and the groups."""

    values: Tensor
    """[N] float64; exactly 0 where all rewards of the group are equal."""
    group: Tensor
    """[N] int64: number of each sample's group, from 0 to G - 1."""
    size: Tensor
    """[G] int64: samples of each group."""
    varied: Tensor
    """[G] bool: whether the rewards of the group are not all equal."""


def centre_by_group(rewards: Tensor, group_ids: Tensor, *, weights: Tensor | None = None) -> CentredRewards:
    """Each reward minus the mean of its group, or the mean weighted by `weights`.

    rewards: [N] floating. group_ids: [N] integers of any size and sign; equal ids make a group, wherever its members
    stand. weights: [N] integers, none negative; a group whose weights sum to 0 gets 0. Raises ValueError that names the
    first sample whose reward is not finite.

    >>> rewards, group_ids = torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.tensor([7, -3, 7, -3])
    >>> centre_by_group(rewards, group_ids).values.tolist()
    [0.5, 0.0, -0.5, 0.0]
    >>> centre_by_group(rewards, group_ids, weights=torch.tensor([3, 1, 1, 1])).values.tolist()
    [0.25, 0.0, -0.75, 0.0]
    """
    expect("N", rewards=rewards, group_ids=group_ids)
    check_rewards(rewards, group_ids)
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    exact, total_weight, weighted = rewards.double(), size, rewards.double()
    if weights is not None:
        expect("N", rewards=rewards, weights=weights)
        total_weight, weighted = sum_by_group(weights, group, size), weights.double() * exact
    baseline = sum_by_group(weighted, group, size) / total_weight.clamp(min=1)
    varied = _varied(rewards, group, size)
    # A mean of equal numbers need not equal them in floating point, and 1e-17 / 1e-6 would not be 0.
    counts = varied & (total_weight > 0)
    values = torch.where(counts[group], exact - baseline[group], 0.0)
    return CentredRewards(values, group, size, varied)


def sum_by_group(values: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Sum of `values` [N] over each group; group: [N] numbers of groups, size: [G]. Returns [G], dtype of `values`.

    >>> sum_by_group(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), torch.tensor([1, 2])).tolist()
    [2.0, 5.0]
    """
    # In ascending order, so that no order of the batch changes how the sum is rounded.
    order = values.argsort(stable=True)
    total = torch.zeros(size.shape, dtype=values.dtype, device=values.device)
    return total.index_add_(0, group[order], values[order])


def _varied(rewards: Tensor, group: Tensor, size: Tensor) -> Tensor:
    bounds = torch.zeros(size.shape, dtype=rewards.dtype, device=rewards.device)
    lowest = bounds.scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = bounds.scatter_reduce(0, group, rewards, "amax", include_self=False)
    return lowest.ne(highest)
