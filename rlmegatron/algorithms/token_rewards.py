"""Owns where a sample's reward lands among its tokens, and the divergence charged along the way.

In: one reward per sample and, optionally, a divergence per token; out: one reward per token. Must never import
torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.finite import check_rewards
from rlmegatron.algorithms.ragged import sequence_ids
from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def token_rewards(
    rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """The sample's reward at its last counted token, minus kl_coef * kl at every counted token.

    Summed over a sample this is its reward minus the coefficient times its divergence (arXiv 1909.08593, eq. 2).
    A sample without counted tokens gets nothing, and its reward touches no other sample's token.

    rewards: [N] floating. mask: [T] bool. cu_seqlens: [N+1]. kl: [T] nats, from `divergence`, or None.
    Returns [T] in the dtype of `rewards`, 0 where not counted. Raises ValueError for a kl_coef without a kl, and for a
    reward that is not finite; it names the sequence by its place in `rewards`.

    >>> mask, cu_seqlens = torch.tensor([False, True, True, False]), torch.tensor([0, 3, 4])
    >>> token_rewards(torch.tensor([1.0, 8.0]), mask, cu_seqlens, kl=torch.full((4,), 0.5), kl_coef=0.5).tolist()
    [0.0, -0.25, 0.75, 0.0]
    """
    (num_tokens,) = expect("T", mask=mask)
    if expect("N", rewards=rewards) != expect("N+1", cu_seqlens=cu_seqlens):
        raise ValueError(
            f"rewards has {rewards.shape[0]} entries, but cu_seqlens delimits {cu_seqlens.shape[0] - 1} sequences"
        )
    check_rewards(rewards)
    per_token = torch.zeros(num_tokens, dtype=rewards.dtype, device=rewards.device)
    last = _last_counted(mask, cu_seqlens)
    answered = last >= 0
    per_token[last[answered]] = rewards[answered]
    if kl is None:
        if kl_coef:
            raise ValueError(f"kl_coef is {kl_coef}, but no kl was given")
        return per_token
    expect("T", mask=mask, kl=kl)
    charged = kl_coef * torch.where(mask, kl, torch.zeros_like(kl)).double()
    return (per_token.double() - charged).to(rewards.dtype)


def _last_counted(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Position [N] of each sequence's last counted token, -1 for none."""
    num_tokens = mask.shape[0]
    positions = torch.arange(num_tokens, device=mask.device)[mask]
    last = torch.full((cu_seqlens.shape[0] - 1,), -1, dtype=torch.int64, device=mask.device)
    return last.scatter_reduce(0, sequence_ids(cu_seqlens, num_tokens)[mask], positions, "amax")
