"""How one Megatron parameter is made of Hugging Face tensors, as data: parts, a cut dimension and a number of blocks.

In: a rule and a (size, rank) of the axis that cuts it. Out: boxes, i.e. which rectangle of which Hugging Face tensor
lies where in the local parameter. Pure; must never import torch, megatron or anything that communicates.

The unsharded Megatron parameter consists, along `dim`, of `blocks` blocks, and a block of one slice of every part in
turn; every rank of the axis holds an equal window of it. That one form covers all layers: a column- or row-parallel
weight has one part, a gated MLP two parts and one block a rank, a fused QKV three parts and one block per query group.
A window need not end at a block: with fewer KV heads than ranks, Megatron cuts through a query group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlmegatron.config.partition import stage_sizes

Box = tuple[tuple[int, int], ...]
"""Half-open [start, stop) per dimension."""

Axis = Literal["tp", "etp"]
"""Which axis cuts a parameter: tensor parallelism, or that of the experts."""


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
    """One parameter (or buffer) of the unsharded model.

    `path` is its name in Megatron's own layer specs, and `fused` in Transformer Engine's where that differs (norms
    fused into the following linear, grouped experts); `{layer}` and `{expert}` stand for numbers, which count from 0
    on every pipeline chunk and expert-parallel rank. `dim` None means that every rank holds all of it. `blocks` None
    means one block per rank. `padded` is the vocabulary size after padding: rows beyond the tensor's own exist in
    Megatron only. `copy` marks a second home of a tensor (the output layer of tied embeddings on the last stage):
    loaded, never exported. `keeps_fp32` marks what stays in fp32 whatever type the model has.
    """

    path: str
    parts: tuple[Part, ...]
    dim: int | None = None
    blocks: int | None = None
    padded: int | None = None
    copy: bool = False
    fused: str | None = None
    layer: int | None = None
    expert: int | None = None
    keeps_fp32: bool = False

    @property
    def parameter(self) -> str:
        """The parameter's name in the unsharded model, with Megatron's own specs."""
        return self.path.format(layer=self.layer, expert=self.expert)

    @property
    def axis(self) -> Axis:
        """The axis that cuts it, if any does."""
        return "tp" if self.expert is None else "etp"

    def whole_size(self) -> int:
        """Length of the unsharded parameter along `dim`."""
        assert self.dim is not None, f"{self.parameter} is never cut"
        return self.padded or sum(part.shape[self.dim] for part in self.parts)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's parameter when the axis has `size` ranks."""
        shape = list(self.parts[0].shape)
        if self.dim is not None:
            shape[self.dim] = self.whole_size() // size
        return tuple(shape)

    def pieces(self, *, size: int, rank: int) -> Iterator[Piece]:
        """The pieces of rank `rank` of `size` on the rule's axis, in the order of their place in the parameter."""
        if self.dim is None:
            part = self.parts[0]
            whole = tuple((0, length) for length in part.shape)
            yield Piece(part.name, whole, whole)
            return
        total, blocks = self.whole_size(), self.blocks or size
        if total % size or any((self.padded or part.shape[self.dim]) % blocks for part in self.parts):
            raise ValueError(f"{self.parameter}: {total} rows in {blocks} blocks cannot be cut over {size} ranks")
        low, high, per_block = rank * total // size, (rank + 1) * total // size, total // blocks
        for block in range(low // per_block, -(-high // per_block)):
            yield from self._of_block(block, offset=block * per_block, blocks=blocks, low=low, high=high)

    def _of_block(self, block: int, *, offset: int, blocks: int, low: int, high: int) -> Iterator[Piece]:
        assert self.dim is not None
        for part in self.parts:
            length = (self.padded or part.shape[self.dim]) // blocks
            start, stop = max(low, offset), min(high, offset + length)
            first = block * length + start - offset
            last = min(first + stop - start, part.shape[self.dim])
            if last > first:
                target = (start - low, start - low + last - first)
                yield Piece(part.name, self._box(part, (first, last)), self._box(part, target))
            offset += length

    def _box(self, part: Part, span: tuple[int, int]) -> Box:
        return tuple(span if dim == self.dim else (0, size) for dim, size in enumerate(part.shape))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline chunk holds: `layers` are global layer numbers in order."""

    layers: tuple[int, ...]
    is_first: bool
    is_last: bool


def stages(
    *, num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> dict[tuple[int, int], Stage]:
    """(pipeline rank, virtual chunk) -> what it holds, as Megatron cuts it.

    Chunks are equal, but for the first and the last stage where `first` and `last` give their layers (`vpp` is 1 then).
    """
    sizes = stage_sizes(num_layers=num_layers, pp=pp, vpp=vpp, first=first, last=last)
    found, start = {}, 0
    for chunk in range(vpp):
        for rank in range(pp):
            ends = (rank == 0 and chunk == 0, rank == pp - 1 and chunk == vpp - 1)
            found[rank, chunk] = Stage(tuple(range(start, start + sizes[rank])), *ends)
            start += sizes[rank]
    return found


def on_stage(
    rules: tuple[Rule, ...], stage: Stage, experts: range | None = None
) -> Iterator[tuple[str, str | None, Rule]]:
    """The rules of one stage as (local name, its fused name, rule); layers and experts are renumbered from 0.

    `experts` are the global numbers that this expert-parallel rank holds; None means all.
    """
    local = {number: index for index, number in enumerate(stage.layers)}
    for rule in rules:
        if not _is_held(rule, stage, local, experts):
            continue
        layer = None if rule.layer is None else local[rule.layer]
        expert = rule.expert if rule.expert is None or experts is None else rule.expert - experts.start
        fused = rule.fused.format(layer=layer, expert=expert) if rule.fused else None
        yield rule.path.format(layer=layer, expert=expert), fused, rule


def _is_held(rule: Rule, stage: Stage, layers: dict[int, int], experts: range | None) -> bool:
    if rule.layer is not None:
        return rule.layer in layers and (rule.expert is None or experts is None or rule.expert in experts)
    if rule.path.startswith("embedding."):
        return stage.is_first
    return stage.is_last and not (rule.copy and stage.is_first)
