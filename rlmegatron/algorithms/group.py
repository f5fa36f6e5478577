"""Owns the advantages that compare a sample with the other samples of its prompt.

In: one reward and one group id per sample of the WHOLE global batch, in any order; out: one advantage per sample.
Must never import torch.distributed or the configuration: the caller gathers the rewards of all ranks first.
"""

# N samples of the global batch

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def grpo(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool) -> Tensor:
    """Reward minus the mean of its group, over the group's standard deviation + 1e-6 (GRPO, arXiv 2402.03300, 4.1.2).

    The deviation is the unbiased one (n - 1), as in verl (`compute_grpo_outcome_advantage`, same 1e-6) and TRL
    (`GRPOTrainer`, 1e-4). `normalize_std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). A group of one,
    and a group whose rewards are all equal, say nothing about the policy: their advantages are exactly 0 (verl instead
    passes the bare reward of a group of one through).

    rewards: [N] floating, any unit. group_ids: [N] integers; equal ids make a group, wherever its members stand.
    Returns [N] in the dtype of `rewards`. Raises ValueError that names the first sample whose reward is not finite.

    >>> grpo(torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.tensor([7, 3, 7, 3]), normalize_std=False).tolist()
    [0.5, 0.0, -0.5, 0.0]
    """
    expect("N", rewards=rewards, group_ids=group_ids)
    bad = (~rewards.isfinite()).nonzero()
    if bad.numel():
        index = int(bad[0])
        raise ValueError(f"reward of sample {index} (group {int(group_ids[index])}) is {float(rewards[index])}")
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    centred: Tensor = rewards.double() - _group_sum(rewards.double(), group, count)[group] / count[group]
    # A mean of equal numbers need not equal them in floating point, and 1e-17 / 1e-6 would not be 0.
    centred = torch.where(_all_equal(rewards, group, count)[group], 0.0, centred)
    if normalize_std:
        variance = _group_sum(centred.square(), group, count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)[group]
    return centred.to(rewards.dtype)


def _group_sum(values: Tensor, group: Tensor, count: Tensor) -> Tensor:
    return torch.zeros(count.shape, dtype=values.dtype, device=values.device).index_add_(0, group, values)


def _all_equal(rewards: Tensor, group: Tensor, count: Tensor) -> Tensor:
    bounds = torch.zeros(count.shape, dtype=rewards.dtype, device=rewards.device)
    lowest = bounds.scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = bounds.scatter_reduce(0, group, rewards, "amax", include_self=False)
    return lowest.eq(highest)
