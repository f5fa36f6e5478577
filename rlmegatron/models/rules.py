"""How one Megatron parameter is made of Hugging Face tensors, as data: parts, a cut dimension and a number of blocks.

In: a rule and a tensor-parallel (size, rank). Out: boxes, i.e. which rectangle of which Hugging Face tensor lies where
in the local parameter. Pure; must never import torch, megatron or anything that communicates.

A Megatron parameter that is cut along `dim` consists of `blocks` blocks, and a block of one slice of every part in
turn. That one form covers all dense layers: a column- or row-parallel weight has one part and one block a rank, a gated
MLP two parts and one block a rank, a fused QKV three parts and one block per query group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open [start, stop) per dimension."""


@dataclass(frozen=True, slots=True)
class Part:
    """One Hugging Face tensor and its whole shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """`parameter[target] = tensor(name)[source]`."""

    name: str
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of the unsharded model; `parameter` carries the global layer number.

    `fused` is its name in Transformer Engine's specs where norms are fused into the following linear. `dim` None means
    that every tensor-parallel rank holds all of it. `blocks` None means one block per rank. `padded` is the vocabulary
    size after padding: rows beyond the tensor's own exist in Megatron only. `copy` marks a second home of a tensor
    (the output layer of tied embeddings on the last stage): loaded, never exported.
    """

    parameter: str
    parts: tuple[Part, ...]
    dim: int | None = None
    blocks: int | None = None
    padded: int | None = None
    copy: bool = False
    fused: str | None = None

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one rank's parameter."""
        shape = list(self.parts[0].shape)
        if self.dim is not None:
            whole = self.padded or sum(part.shape[self.dim] for part in self.parts)
            shape[self.dim] = whole // tp
        return tuple(shape)

    def pieces(self, *, tp: int, rank: int) -> Iterator[Piece]:
        """The pieces of tensor-parallel rank `rank` of `tp`, in the order of their place in the parameter."""
        if self.dim is None:
            part = self.parts[0]
            whole = tuple((0, size) for size in part.shape)
            yield Piece(part.name, whole, whole)
            return
        blocks = self.blocks or tp
        if blocks % tp:
            raise ValueError(f"{self.parameter}: {blocks} blocks cannot be cut for tensor-parallel size {tp}")
        offset = 0
        for block in range(rank * blocks // tp, (rank + 1) * blocks // tp):
            for part in self.parts:
                size = (self.padded or part.shape[self.dim]) // blocks
                start, stop = block * size, min((block + 1) * size, part.shape[self.dim])
                if stop > start:
                    yield Piece(part.name, self._box(part, start, stop), self._box(part, offset, offset + stop - start))
                offset += size

    def _box(self, part: Part, start: int, stop: int) -> Box:
        return tuple((start, stop) if dim == self.dim else (0, size) for dim, size in enumerate(part.shape))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline chunk holds: `layers` are global layer numbers in order."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool


def stages(*, num_layers: int, pp: int, vpp: int) -> dict[tuple[int, int], Stage]:
    """(pipeline rank, virtual chunk) -> what it holds, as Megatron's interleaved schedule cuts equal chunks."""
    size = num_layers // (pp * vpp)
    found = {}
    for chunk in range(vpp):
        for rank in range(pp):
            first = (chunk * pp + rank) * size
            ends = (rank == 0 and chunk == 0, rank == pp - 1 and chunk == vpp - 1)
            found[rank, chunk] = Stage(tuple(range(first, first + size)), *ends)
    return found


LAYER = "decoder.layers."


def on_stage(rules: tuple[Rule, ...], stage: Stage) -> Iterator[tuple[str, str | None, Rule]]:
    """The rules of one stage as (local parameter name, its fused name, rule); layers are renumbered from 0."""
    local = {number: index for index, number in enumerate(stage.layers)}
    for rule in rules:
        if rule.parameter.startswith(LAYER):
            number, rest = rule.parameter.removeprefix(LAYER).split(".", 1)
            if int(number) in local:
                prefix = f"{LAYER}{local[int(number)]}."
                yield prefix + rest, prefix + rule.fused if rule.fused else None, rule
        elif rule.parameter.startswith("embedding."):
            if stage.is_first:
                yield rule.parameter, None, rule
        elif stage.is_last and not (rule.copy and stage.is_first):
            yield rule.parameter, None, rule
