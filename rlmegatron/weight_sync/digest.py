"""A 64-bit digest of a tensor's exact bits, equal on CPU and GPU, cheap enough to take after every publish.

In: a tensor. Out: an int. Runs in the learner and inside the engine's workers, so it must import torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64: spreads the position over all bits


def digest(tensor: Tensor) -> int:
    """Sum over elements of bits * odd(position), modulo 2^64: sensitive to every bit and to every element's place."""
    flat, total = tensor.detach().contiguous().flatten().view(_BITS[tensor.itemsize]), 0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        position = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        total += int((part * (position * _ODD | 1)).sum())
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
