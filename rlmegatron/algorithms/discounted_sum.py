"""Owns the discounted sum from each counted token to the end of its sequence, for all sequences at once.

In: terms of the counted tokens, laid end to end, and each one's sequence; out: sums, each sequence on its own to the
last bit, whatever lies beside it. Must never import torch.distributed or the configuration.
"""

# C counted tokens

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.shapes import expect


def discounted_sum(terms: Tensor, ids: Tensor, *, decay: float) -> Tensor:
    """S_t = terms_t + decay * S_t+1 within each sequence, S = terms at its last counted token.

    Doubling (Hillis and Steele 1986): log2 of the longest sequence vector operations instead of one step per token.

    terms: [C] floating. ids: [C], the sequence of each counted token, never falling. Returns [C], dtype of `terms`.

    >>> discounted_sum(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 0, 1]), decay=0.5).tolist()
    [3.0, 4.0, 4.0, 8.0]
    """
    expect("C", terms=terms, ids=ids)
    total, reach, step = terms.clone(), decay * goes_on(ids).to(terms.dtype), 1
    longest = _longest_run(ids)
    while step < longest:
        # where: 0 * NaN would carry a sequence's NaN into its neighbour.
        total[:-step] += torch.where(reach[:-step] != 0, reach[:-step] * total[step:], 0.0)
        reach[:-step] = reach[:-step] * reach[step:]
        step *= 2
    return total


def goes_on(ids: Tensor) -> Tensor:
    """[C] bool: whether the next counted token belongs to the same sequence; ids: [C].

    >>> goes_on(torch.tensor([0, 0, 2])).tolist()
    [True, False, False]
    """
    same = torch.zeros_like(ids, dtype=torch.bool)
    same[:-1] = ids[1:] == ids[:-1]
    return same


def check_fraction(name: str, number: float) -> None:
    """Raise ValueError unless 0 <= number <= 1."""
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")


def _longest_run(ids: Tensor) -> int:
    return int(torch.unique_consecutive(ids, return_counts=True)[1].max()) if ids.numel() else 0
