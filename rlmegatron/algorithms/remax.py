"""Owns the advantage that compares a sample with the most likely answer to its prompt.

In: one reward per sample and the greedy answer's reward for each, of the whole global batch; out: one advantage per
sample. Must never import torch.distributed or the configuration.
"""

# N samples of the global batch

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.finite import check_rewards
from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def remax(rewards: Tensor, greedy_rewards: Tensor, *, group_ids: Tensor | None = None) -> Tensor:
    """Reward minus the reward of the same prompt's greedy answer (ReMax, arXiv 2310.10505).

    One sample per prompt is enough. As in verl (`compute_remax_outcome_advantage`) for one reward per answer. Where a
    divergence is charged in the reward, the caller has taken the whole answer's off `rewards`, and none off
    `greedy_rewards`; verl charges each token with what comes after it, which gives the same gradient in the mean.

    rewards, greedy_rewards: [N] floating, one unit. group_ids: [N], only for messages. Returns [N] in the dtype of
    `rewards`, computed in float64. Raises ValueError that names the first sample whose reward, or greedy answer's
    reward, is not finite: NaN there means that the greedy answer was not judged.

    >>> remax(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 1.0, 0.25])).tolist()
    [0.0, -1.0, 0.25]
    """
    expect("N", rewards=rewards, greedy_rewards=greedy_rewards)
    if group_ids is not None:
        expect("N", rewards=rewards, group_ids=group_ids)
    check_rewards(rewards, group_ids)
    check_rewards(greedy_rewards, group_ids, name="greedy reward")
    return (rewards.double() - greedy_rewards.double()).to(rewards.dtype)
