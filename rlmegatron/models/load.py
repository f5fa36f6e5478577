"""Weights from Hugging Face safetensors into a running sharded model: each rank reads only the slices it owns.

In: a directory, the local model chunks and this rank's place. Out: filled parameters, each checked to be covered. Must
never communicate: every rank reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlmegatron.models.rules import Axis, Box, Rule
from rlmegatron.models.source import SafetensorsDirectory


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
    for piece in rule.pieces(size=size, rank=rank):
        parameter[slices(piece.target)] = source.read(piece.name, piece.source, shapes[piece.name]).to(parameter)
