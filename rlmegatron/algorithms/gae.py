"""Owns generalised advantage estimation over ragged sequences.

In: rewards and values per token; out: advantages and returns per token, each sequence on its own, so any split of the
batch into ranks or micro-batches gives the same numbers. Must never import torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences, C counted tokens

from __future__ import annotations

import torch
from torch import Tensor

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
    counted, in the dtype of `values`. Raises ValueError unless gamma and lam lie in [0, 1].

    >>> rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([9.0, 0.5, 0.25])
    >>> mask, cu_seqlens = torch.tensor([False, True, True]), torch.tensor([0, 3])
    >>> [x.tolist() for x in gae(rewards, values, mask, cu_seqlens, gamma=1.0, lam=0.5)]
    [[0.0, 0.125, 0.75], [0.0, 0.625, 1.0]]
    """
    (num_tokens,) = expect("T", token_rewards=token_rewards, values=values, mask=mask)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {number}")
    ids = sequence_ids(cu_seqlens, num_tokens)[mask]
    reward, value = token_rewards[mask].to(values.dtype), values[mask]
    goes_on = torch.zeros_like(ids, dtype=torch.bool)
    goes_on[:-1] = ids[1:] == ids[:-1]
    next_value = torch.where(goes_on, value.roll(-1), 0.0)
    delta = reward + gamma * next_value - value
    advantage = _discounted_sum(delta, gamma * lam * goes_on.to(value.dtype), longest=_longest_run(ids))
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[mask] = advantage
    returns[mask] = advantage + value
    return advantages, returns


def _discounted_sum(terms: Tensor, decay: Tensor, *, longest: int) -> Tensor:
    """S_t = terms_t + decay_t S_t+1 over [C], where decay is 0 at least every `longest` entries and at the last one.

    Doubling (Hillis and Steele 1986): log2(longest) vector operations instead of `longest` steps.
    """
    total, reach, step = terms.clone(), decay.clone(), 1
    while step < longest:
        # where: 0 * NaN would carry a sequence's NaN into its neighbour.
        total[:-step] += torch.where(reach[:-step] != 0, reach[:-step] * total[step:], 0.0)
        reach[:-step] = reach[:-step] * reach[step:]
        step *= 2
    return total


def _longest_run(ids: Tensor) -> int:
    return int(torch.unique_consecutive(ids, return_counts=True)[1].max()) if ids.numel() else 0
