"""Owns the arithmetic of ragged micro-batches: flat per-token tensors [T] whose sequences `cu_seqlens` delimits.

In and out: tensors on one device. Must never import torch.distributed, the configuration, or do any I/O.
"""

# T tokens of all sequences (prompts and answers), N sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.shapes import expect


def sequence_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Number of the sequence that each token belongs to.

    cu_seqlens: [N+1] integers, 0 first, `num_tokens` last, never falling; equal neighbours are an empty sequence.
    Returns [T] int64. Raises ValueError when cu_seqlens does not cover exactly `num_tokens` tokens.

    >>> sequence_ids(torch.tensor([0, 2, 2, 5]), 5).tolist()
    [0, 0, 2, 2, 2]
    """
    (num_sequences,) = expect("N+1", cu_seqlens=cu_seqlens)
    lengths = cu_seqlens.diff()
    ends = (int(cu_seqlens[0]), int(cu_seqlens[-1]))
    if ends != (0, num_tokens) or bool((lengths < 0).any()):
        shown = cu_seqlens.tolist() if num_sequences < 16 else f"{num_sequences + 1} entries, {ends[0]} to {ends[1]}"
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens ({num_tokens}), got {shown}")
    ids = torch.arange(num_sequences, device=cu_seqlens.device)
    return ids.repeat_interleave(lengths.long(), output_size=num_tokens)


def counted_per_sequence(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of counted tokens of every sequence: mask [T] bool, cu_seqlens [N+1]; returns [N] int64.

    >>> counted_per_sequence(torch.tensor([False, True, True, False]), torch.tensor([0, 3, 4])).tolist()
    [2, 0]
    """
    (num_tokens,) = expect("T", mask=mask)
    ids = sequence_ids(cu_seqlens, num_tokens)
    counts = torch.zeros(cu_seqlens.shape[0] - 1, dtype=torch.int64, device=mask.device)
    return counts.index_add_(0, ids, mask.long())


def broadcast_to_tokens(per_sample: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Give every counted token the number of its sample, and every other token 0.

    per_sample: [N], cu_seqlens: [N+1], mask: [T] bool. Returns [T] in the dtype of `per_sample`.

    >>> cu_seqlens, mask = torch.tensor([0, 2, 4]), torch.tensor([False, True, True, True])
    >>> broadcast_to_tokens(torch.tensor([1.0, 2.0]), cu_seqlens, mask).tolist()
    [0.0, 1.0, 2.0, 2.0]
    """
    (num_tokens,) = expect("T", mask=mask)
    if expect("N", per_sample=per_sample) != expect("N+1", cu_seqlens=cu_seqlens):
        raise ValueError(
            f"per_sample has {per_sample.shape[0]} entries, but cu_seqlens delimits {cu_seqlens.shape[0] - 1} sequences"
        )
    per_token = per_sample[sequence_ids(cu_seqlens, num_tokens)]
    return torch.where(mask, per_token, torch.zeros_like(per_token))
