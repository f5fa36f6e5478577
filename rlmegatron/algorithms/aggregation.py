"""Owns how per-token losses become one number: the weight of each token and what the weighted sum is divided by.

In: the mask and sequence bounds of one micro-batch; out: weights per token, and this micro-batch's part of the global
denominator, which the caller sums over the micro-batches and data-parallel ranks of one optimizer step before it
divides once. Must never import torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

from torch import Tensor

from rlmegatron.algorithms.ragged import counted_per_sequence, sequence_ids
from rlmegatron.algorithms.shapes import expect

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def token_weights(mask: Tensor, cu_seqlens: Tensor, aggregation: str, *, constant: float | None = None) -> Tensor:
    """Weight of each token in the loss; 0 for every token that does not count.

    token_mean (DAPO, arXiv 2503.14476, eq. 8): 1. seq_mean_token_mean (GRPO, arXiv 2402.03300, eq. 3): 1 / number of
    counted tokens of the token's sequence. seq_mean_token_sum (the gradient of an answer's own log-probability, as in
    REINFORCE): 1. seq_mean_token_sum_norm (Dr. GRPO, arXiv 2503.20783, listing 1): 1 / constant, the same for all
    answers. mask: [T] bool, cu_seqlens: [N+1]. constant: tokens, read by the last one only. Returns [T] float32.
    Raises ValueError for an unknown aggregation, or a constant that is needed and not positive.

    >>> import torch
    >>> mask, cu_seqlens = torch.tensor([False, True, True, True]), torch.tensor([0, 3, 4])
    >>> token_weights(mask, cu_seqlens, "seq_mean_token_mean").tolist()
    [0.0, 0.5, 0.5, 1.0]
    >>> token_weights(mask, cu_seqlens, "seq_mean_token_sum_norm", constant=4).tolist()
    [0.0, 0.25, 0.25, 0.25]
    """
    _check(aggregation)
    (num_tokens,) = expect("T", mask=mask)
    if aggregation == "seq_mean_token_mean":
        counts = counted_per_sequence(mask, cu_seqlens)
        return mask.float() / counts.clamp(min=1)[sequence_ids(cu_seqlens, num_tokens)]
    if aggregation == "seq_mean_token_sum_norm":
        if constant is None or not constant > 0:
            raise ValueError(f"aggregation {aggregation!r} divides by a positive constant, got {constant}")
        return mask.float() / constant
    return mask.float()


def denominator_part(mask: Tensor, cu_seqlens: Tensor, aggregation: str) -> float:
    """This micro-batch's part of the count that the summed loss is divided by.

    token_mean: counted tokens; the others: sequences with at least one counted token (an empty answer is no sequence).
    mask: [T] bool, cu_seqlens: [N+1].

    >>> import torch
    >>> denominator_part(torch.tensor([False, True, True, True]), torch.tensor([0, 1, 4]), "seq_mean_token_sum")
    1.0
    """
    _check(aggregation)
    if aggregation == "token_mean":
        expect("T", mask=mask)
        return float(mask.sum())
    return float((counted_per_sequence(mask, cu_seqlens) > 0).sum())


def _check(aggregation: str) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r}: unknown; use {', '.join(AGGREGATIONS)}")
