"""Owns the advantage that is the reward still to come.

In: rewards per token of one rank's sequences; out: advantages and returns per token, each sequence on its own. Must
never import torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.discounted_sum import check_fraction, discounted_sum
from rlmegatron.algorithms.finite import check_token_rewards
from rlmegatron.algorithms.ragged import sequence_ids
from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def reinforce_pp(token_rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted reward to go, G_t = r_t + gamma G_t+1, the first half of REINFORCE++ (arXiv 2501.03262, 3.1).

    With gamma 1 and a divergence charged in the reward this is the paper's r - beta * (divergence from t on). The
    second half, mean 0 and standard deviation 1 over all tokens of the global batch, is the caller's (`whitening`).
    t runs over the counted tokens of a sequence; others are skipped (verl starts the sum anew there). It is `gae` with
    values 0 and lam 1.

    token_rewards: [T] reward of choosing token t. mask: [T] bool. cu_seqlens: [N+1]. Returns (advantages [T],
    returns [T]), equal, 0 where not counted, in the dtype of `token_rewards`, computed in float64. Raises ValueError
    unless gamma lies in [0, 1], and for a counted token whose reward is not finite.

    >>> mask, cu_seqlens = torch.tensor([False, True, True, True]), torch.tensor([0, 3, 4])
    >>> [x.tolist() for x in reinforce_pp(torch.tensor([9.0, -1.0, 2.0, 4.0]), mask, cu_seqlens, gamma=0.5)]
    [[0.0, 0.0, 2.0, 4.0], [0.0, 0.0, 2.0, 4.0]]
    """
    (num_tokens,) = expect("T", token_rewards=token_rewards, mask=mask)
    check_fraction("gamma", gamma)
    ids = sequence_ids(cu_seqlens, num_tokens)[mask]
    rewards = token_rewards[mask]
    check_token_rewards(rewards, mask, ids)
    to_go = torch.zeros_like(token_rewards)
    to_go[mask] = discounted_sum(rewards.double(), ids, decay=gamma).to(token_rewards.dtype)
    return to_go, to_go.clone()
