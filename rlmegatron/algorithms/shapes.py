"""Owns the shape check that opens every public function of this package.

In: a pattern of letters and the tensors that must have it; out: the sizes that the letters stand for. Must never
import torch.distributed, the configuration, or another package of ours.
"""

from __future__ import annotations

import re

from torch import Tensor

_DIM = re.compile(r"(?P<letter>[A-Z][a-z]*)?(?P<offset>[+-]?\d+)?")


def expect(pattern: str, **tensors: Tensor) -> tuple[int, ...]:
    """Require that all `tensors` have the shape `pattern`, and return the size of each letter in order of appearance.

    A pattern is a list of dims such as "T", "B G", "N+1" or "T 3"; a letter has one size within a call. Raises
    ValueError that names the tensor, its shape and the pattern.

    >>> import torch
    >>> expect("B G", rewards=torch.zeros(2, 8))
    (2, 8)
    >>> expect("N+1", cu_seqlens=torch.tensor([0, 3, 5]))
    (2,)
    """
    dims = [_parse(dim, pattern) for dim in pattern.split()]
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if len(shape) != len(dims):
            raise ValueError(f"{name} must have shape [{pattern}], got {shape}")
        for size, (letter, offset) in zip(shape, dims, strict=True):
            if not letter:
                if size != offset:
                    raise ValueError(f"{name} must have shape [{pattern}], got {shape}")
                continue
            value = size - offset
            if value < 0:
                raise ValueError(f"{name} must have shape [{pattern}], got {shape}")
            if sizes.setdefault(letter, value) != value:
                known = f"{letter}={sizes[letter]} from {owner[letter]}"
                raise ValueError(f"{name} must have shape [{pattern}] with {known}, got {shape}")
            owner.setdefault(letter, name)
    return tuple(sizes.values())


def _parse(dim: str, pattern: str) -> tuple[str, int]:
    match = _DIM.fullmatch(dim)
    assert match is not None, f"bad dim {dim!r} in shape pattern {pattern!r}"
    return match["letter"] or "", int(match["offset"] or 0)
