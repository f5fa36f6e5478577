"""Owns how differences of log-probabilities become probability ratios, of tokens and of whole answers.

In: log-ratios per token; out: ratios that are finite for every finite input. Must never import torch.distributed or
the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.ragged import counted_per_sequence, sequence_ids
from rlmegatron.algorithms.shapes import expect

MAX_LOG_RATIO = 20.0
"""Where a log-ratio is cut before it is exponentiated, as in verl; e^20 is 5e8, far from any float's limit."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), of any shape, cut to [-20, 20] first; no gradient outside.

    >>> bounded_exp(torch.tensor([0.0, 1000.0])).log().tolist()
    [0.0, 20.0]
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_log_ratio(log_ratio: Tensor, counted: Tensor, cu_seqlens: Tensor, *, mean: bool) -> Tensor:
    """Sum, or mean, of the log-ratios of each sequence's counted tokens; 0 for a sequence without any.

    In float64: a sum of 100,000 numbers, one by one and on a GPU in any order, has four digits in single precision.

    log_ratio: [T] nats, may be anything where not counted. counted: [T] bool. cu_seqlens: [N+1]. Returns [N] float64,
    with log_ratio's gradient.

    >>> log_ratio, counted = torch.tensor([9.0, 1.0, 2.0, 5.0]), torch.tensor([False, True, True, True])
    >>> sequence_log_ratio(log_ratio, counted, torch.tensor([0, 3, 3, 4]), mean=True).tolist()
    [1.5, 0.0, 5.0]
    """
    (num_tokens,) = expect("T", log_ratio=log_ratio, counted=counted)
    kept = torch.where(counted, log_ratio, torch.zeros_like(log_ratio)).double()
    totals = kept.new_zeros(cu_seqlens.shape[0] - 1).index_add(0, sequence_ids(cu_seqlens, num_tokens), kept)
    return totals / counted_per_sequence(counted, cu_seqlens).clamp(min=1) if mean else totals
