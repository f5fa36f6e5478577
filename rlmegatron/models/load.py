"""Weights from Hugging Face safetensors into a running sharded model: each rank reads only the slices it owns.

In: a directory, the local model chunks and this rank's place. Out: filled parameters, each checked to be covered. Must
never communicate: every rank reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.decoder_rules import EMBEDDING, HEAD
from rlmegatron.models.rules import Axis, Box, Piece, Rule
from rlmegatron.models.source import SafetensorsDirectory

_BYTES_AT_ONCE = 1 << 27


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


@torch.no_grad()
def load_parameters(
    source: SafetensorsDirectory,
    parameters: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    *,
    cut: Callable[[Axis], tuple[int, int]],
) -> None:
    """Fill `parameters` (one chunk's, by local name) from `source`.

    `cut` gives (size, rank) of an axis.
    """
    for name, parameter in parameters.items():
        size, rank = cut(rules[name].axis)
        shape = rules[name].local_shape(size)
        assert tuple(parameter.shape) == shape, (
            f"{name}: Megatron built {tuple(parameter.shape)}, the rule says {shape}"
        )
        fill(parameter, rules[name], source, size=size, rank=rank)


@torch.no_grad()
def fill(parameter: Tensor, rule: Rule, source: SafetensorsDirectory, *, size: int, rank: int) -> None:
    """One parameter of rank `rank` of `size` on the rule's axis; rows of vocabulary padding become 0."""
    if rule.padded:
        parameter.zero_()
    shapes = {part.name: part.shape for part in rule.parts}
    for strip in strips(rule, size=size, rank=rank):
        parameter[slices(strip.target)] = source.read(strip.name, strip.source, shapes[strip.name]).to(parameter)


def strips(rule: Rule, *, size: int, rank: int) -> Iterator[Piece]:
    """The pieces of a rank, cut into rows that are read at once: a vocabulary should not be there twice."""
    for piece in rule.pieces(size=size, rank=rank):
        ((low, high), *inner), ((start, _), *inner_target) = piece.source, piece.target
        step = max(1, _BYTES_AT_ONCE // max(1, 4 * prod(stop - first for first, stop in inner)))
        for row in range(low, high, step):
            stop, shift = min(row + step, high), start - low
            yield Piece(piece.name, ((row, stop), *inner), ((row + shift, stop + shift), *inner_target))


def hold_to(arch: Architecture, directory: str | Path) -> list[str]:
    """Hold a directory of safetensors to an architecture; what is left out of it, a line each.

    One ValueError names what is missing, broken, of another shape or of no use.
    """
    parts = [part for rule in arch.parameter_rules(1) for part in rule.parts]
    copies = {HEAD: EMBEDDING} if arch.tied_embeddings else None
    return SafetensorsDirectory(directory, fp8_block=arch.fp8_block).expect(parts, arch.dropped, copies=copies)
