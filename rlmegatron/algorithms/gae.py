"""Owns generalised advantage estimation over ragged sequences.

In: rewards and values per token; out: advantages and returns per token, each sequence on its own, so any split of the
batch into ranks or micro-batches gives the same numbers. Must never import torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.discounted_sum import check_fraction, discounted_sum, goes_on
from rlmegatron.algorithms.finite import check_token_rewards
from rlmegatron.algorithms.ragged import sequence_ids
from rlmegatron.algorithms.shapes import expect


@torch.no_grad()
def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages A_t = delta_t + gamma lam A_t+1 with delta_t = r_t + gamma V_t+1 - V_t (arXiv 1506.02438, eq. 16).

    t runs over the counted tokens of a sequence; tokens that do not count (the prompt, or a tool's output in between)
    are skipped, not visited. The value after the last counted token is 0, also for an answer that was cut off at its
    length limit: being cut off is treated as an end, not bootstrapped (as in TRL and verl).

    token_rewards: [T] reward of choosing token t. values: [T] value of the state in which token t is chosen.
    mask: [T] bool. cu_seqlens: [N+1]. Returns (advantages [T], returns [T] = advantages + values), 0 where not
    counted, in the dtype of `values`, computed in float64. Raises ValueError unless gamma and lam lie in [0, 1], and
    for a counted token whose reward is not finite; a value that is not finite stays within its sequence.

    >>> rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([9.0, 0.5, 0.25])
    >>> mask, cu_seqlens = torch.tensor([False, True, True]), torch.tensor([0, 3])
    >>> [x.tolist() for x in gae(rewards, values, mask, cu_seqlens, gamma=1.0, lam=0.5)]
    [[0.0, 0.125, 0.75], [0.0, 0.625, 1.0]]
    """
    (num_tokens,) = expect("T", token_rewards=token_rewards, values=values, mask=mask)
    check_fraction("gamma", gamma)
    check_fraction("lam", lam)
    ids = sequence_ids(cu_seqlens, num_tokens)[mask]
    reward, value = token_rewards[mask].double(), values[mask].double()
    check_token_rewards(reward, mask, ids)
    next_value = torch.where(goes_on(ids), value.roll(-1), 0.0)
    delta = reward + gamma * next_value - value
    advantage = discounted_sum(delta, ids, decay=gamma * lam)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = advantage.to(values.dtype)
    returns[mask] = (advantage + value).to(values.dtype)
    return advantages, returns
