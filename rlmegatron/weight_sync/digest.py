"""A 64-bit digest of a tensor's exact bits, equal on CPU and GPU, that can be taken piece by piece.

In: a tensor, or a rectangle of one. Out: an int; those of all rectangles of a tensor add up to that of the tensor,
modulo 2^64, however it is cut. Runs in the learner and inside the engine's workers, so it must import torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64: spreads the position over all bits


def digest(tensor: Tensor, *, row: int = 0, column: int = 0, width: int | None = None) -> int:
    """Sum over elements of bits * odd(position), modulo 2^64: sensitive to every bit and to every element's place.

    tensor: whole, or the rectangle that begins at (`row`, `column`) of one whose rows have `width` elements.
    """
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    width, total = width or matrix.shape[1], 0
    columns = torch.arange(column + 1, column + 1 + matrix.shape[1], device=tensor.device)
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), step):
        part = matrix[start : start + step].contiguous().view(_BITS[tensor.itemsize]).long()
        rows = torch.arange(row + start, row + start + len(part), device=tensor.device)
        position = rows[:, None] * width + columns
        total += int((part * (position * _ODD | 1)).sum())
    return wrapped(total)


def wrapped(total: int) -> int:
    """A sum of digests as a signed 64-bit number."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
