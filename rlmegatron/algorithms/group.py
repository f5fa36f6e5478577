"""Owns the advantages that compare a sample with the other samples of its prompt.

In: one reward and one group id per sample of the WHOLE global batch, in any order; out: one advantage per sample.
Must never import torch.distributed or the configuration: the caller gathers the rewards of all ranks first.
"""

# N samples of the global batch

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.grouping import centre_by_group, sum_by_group
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
    centred = centre_by_group(rewards, group_ids)
    advantages = centred.values
    if normalize_std:
        variance = sum_by_group(advantages.square(), centred.group, centred.size) / (centred.size - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + 1e-6)[centred.group]
    return advantages.to(rewards.dtype)


@torch.no_grad()
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean of the group's other samples (RLOO, arXiv 2402.14740, the leave-one-out estimator).

    Computed as n / (n - 1) times (reward - mean of all n), which is the same. A group of one has no others: 0, as in
    verl's vectorized form (its other form passes the bare reward through).

    rewards: [N] floating, any unit. group_ids: [N] integers. Returns [N] in the dtype of `rewards`. Raises ValueError
    that names the first sample whose reward is not finite.

    >>> rloo(torch.tensor([3.0, 9.0, 0.0, 0.0]), torch.tensor([1, 2, 1, 1])).tolist()
    [3.0, 0.0, -1.5, -1.5]
    """
    centred = centre_by_group(rewards, group_ids)
    scale = centred.size.double() / (centred.size - 1).clamp(min=1)
    return (scale[centred.group] * centred.values).to(rewards.dtype)


@torch.no_grad()
def opo(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the group's length-weighted mean reward, sum(l r) / sum(l) (OPO, arXiv 2505.23585).

    This baseline makes the variance of the gradient smallest if the squared norm of a sample's gradient grows with its
    length. There is no division by a deviation. Within a group the advantages sum to 0 weighted by length: over tokens,
    not over samples. An empty answer adds nothing to the baseline, and a group of empty answers gets 0.

    rewards: [N] floating, any unit. group_ids: [N] integers. lengths: [N] int64, counted tokens. Returns [N] in the
    dtype of `rewards`. Raises ValueError for a reward that is not finite or a negative length; both name the sample.

    >>> opo(torch.tensor([1.0, 0.0, 7.0]), torch.tensor([4, 4, 2]), torch.tensor([30, 10, 5])).tolist()
    [0.25, -0.75, 0.0]
    """
    expect("N", rewards=rewards, group_ids=group_ids, lengths=lengths)
    negative = (lengths < 0).nonzero()
    if negative.numel():
        index = int(negative[0])
        raise ValueError(f"length of sample {index} (group {int(group_ids[index])}) is {int(lengths[index])}")
    return centre_by_group(rewards, group_ids, weights=lengths).values.to(rewards.dtype)


@torch.no_grad()
def gpg(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean of its group, times N / (samples in groups whose rewards differ) (GPG, arXiv 2504.02546).

    The factor is the paper's B / (B - M), where all answers of M of the B groups are right or all are wrong (2.2,
    accurate gradient estimation; F_norm = 1): such groups have no gradient, yet the mean over the batch counts them.
    Samples are counted rather than groups, which is the same for groups of one size, and right for others. verl
    (`compute_gpg_outcome_advantage`) instead divides N by the number of samples whose reward is not 0, so that its
    factor depends on where the reward's zero is, and passes the bare reward of a group of one through; here that is 0,
    and the group counts as one without a gradient.

    rewards: [N] floating, any unit. group_ids: [N] integers. Returns [N] in the dtype of `rewards`. Raises ValueError
    that names the first sample whose reward is not finite.

    >>> gpg(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    centred = centre_by_group(rewards, group_ids)
    num_useful = centred.varied[centred.group].sum().clamp(min=1)
    return (centred.values * rewards.shape[0] / num_useful).to(rewards.dtype)


@torch.no_grad()
def reinforce_pp_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean of its group, the first half of REINFORCE++ with baseline (arXiv 2501.03262, 3.2).

    The second half, mean 0 and standard deviation 1 over all tokens of the global batch, is the caller's (`whitening`).
    verl (`compute_reinforce_plus_plus_baseline_outcome_advantage`) differs in a group of one, whose bare reward it
    keeps; here that is 0.

    rewards: [N] floating, any unit. group_ids: [N] integers. Returns [N] in the dtype of `rewards`. Raises ValueError
    that names the first sample whose reward is not finite.

    >>> reinforce_pp_baseline(torch.tensor([2.0, 4.0, 0.0]), torch.tensor([5, 6, 5])).tolist()
    [1.0, 0.0, -1.0]
    """
    return centre_by_group(rewards, group_ids).values.to(rewards.dtype)
