"""Which part of which training rank's parameters goes where in an engine: the reshard as tables of numbers.

In: the parameter rules, the layout of a replica and the placements of an engine. Out: a `Plan`: for every rank of an
engine the pieces that make up its parameters, each element once, each from one rank of the replica. Pure; must never
import torch or communicate.

A piece is the intersection of what a training rank holds with what an engine's rank wants: a box of one Hugging Face
tensor. Where it lies in memory on either side follows from the two rows that it came from, each of which maps a box of
the tensor onto a box of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.models.rules import Box, Rule
from rlmegatron.weight_sync.engine_placement import Placement

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank of a stage holds of tensor `name`: `parameter(rule)[target] = tensor[source]`.

    `shard` is the rank's place on the axis that cuts the rule, None where every rank of the axis holds it alike.
    """

    rule: int
    name: str
    stage: int
    shard: int | None
    source: Box
    target: Box


@dataclass(frozen=True, slots=True)
class Pieces:
    """N pieces of one engine rank: rows [N] of `Plan.held` and of its placements, and the box [N 2 2] in the tensor.

    The box is ((first row, last row), (first column, last column)), half open; a vector is one row.
    """

    held: Ints
    wanted: Ints
    boxes: Ints

    def num_elements(self) -> Ints:
        """[N]."""
        return _areas(self.boxes)


@dataclass(frozen=True, slots=True)
class Plan:
    """`wanted[j]` and `pieces[j]` belong to rank j of an engine, whichever engine of the replica that is."""

    layout: ReplicaLayout
    rules: Sequence[Rule]
    held: Sequence[Held]
    wanted: Sequence[Sequence[Placement]]
    pieces: Sequence[Pieces]

    def sources(self, engine_rank: int, *, on: int) -> Ints:
        """[N] the rank of the replica that gives each piece, where rank `engine_rank` of an engine lies on rank `on`.

        Of the ranks that hold a piece alike it is the one in the same copy of the model as `on`, or `on` itself.
        """
        place, layout = on % self.layout.per_stage, self.layout
        num_local = self._num_experts() // layout.ep
        ranks = np.empty(len(self.held), dtype=np.int64)
        for row, held in enumerate(self.held):
            expert, size = self.rules[held.rule].expert, layout.tp
            first = place // size * size
            if expert is not None:
                size = layout.etp
                copy = size * layout.ep
                first = place // copy * copy + expert // num_local * size
            ranks[row] = held.stage * layout.per_stage + first + (place % size if held.shard is None else held.shard)
        return ranks[self.pieces[engine_rank].held]

    def _num_experts(self) -> int:
        return 1 + max((rule.expert for rule in self.rules if rule.expert is not None), default=-1)


def make_plan(
    rules: Sequence[Rule],
    wanted: Sequence[Sequence[Placement]],
    layout: ReplicaLayout,
    *,
    stage_of: Callable[[Rule], int],
) -> Plan:
    """`wanted[j]` are the placements of rank j of an engine; AssertionError where one is not covered exactly."""
    held = list(_held(rules, layout, stage_of))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(one.name for one in held))}
    table = _Table.of([(numbers[one.name], one.source) for one in held])
    pieces = []
    for placements in wanted:
        asked = _Table.of([(numbers[placement.name], placement.source) for placement in placements])
        pieces.append(_intersect(table, asked))
        _check_cover(pieces[-1], asked, placements)
    return Plan(layout, rules, held, wanted, pieces)


def _held(rules: Sequence[Rule], layout: ReplicaLayout, stage_of: Callable[[Rule], int]) -> Iterator[Held]:
    for number, rule in enumerate(rules):
        if rule.copy:
            continue
        size = layout.tp if rule.axis == "tp" else layout.etp
        for shard in (None,) if rule.dim is None else range(size):
            for piece in rule.pieces(size=size, rank=shard or 0):
                yield Held(number, piece.name, stage_of(rule), shard, piece.source, piece.target)


@dataclass(frozen=True, slots=True)
class _Table:
    """Boxes of tensors, as columns: tensor numbers [M] and boxes [M 2 2]."""

    tensor: Ints
    boxes: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Box]]) -> _Table:
        tensors = np.array([tensor for tensor, _ in rows], dtype=np.int64)
        boxes = np.array([box if len(box) == 2 else ((0, 1), *box) for _, box in rows], dtype=np.int64)
        return cls(tensors, boxes.reshape(-1, 2, 2))


def _intersect(sources: _Table, wanted: _Table) -> Pieces:
    """Every pair of a source and a wanted box of one tensor that overlap, in the order of the wanted ones."""
    order = np.argsort(sources.tensor, kind="stable")
    keys = sources.tensor[order]
    first, last = (np.searchsorted(keys, wanted.tensor, side=side) for side in ("left", "right"))
    counts = last - first
    row = np.repeat(np.arange(len(wanted.tensor)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = order[np.repeat(first, counts) + within]
    low = np.maximum(sources.boxes[held, :, 0], wanted.boxes[row, :, 0])
    high = np.minimum(sources.boxes[held, :, 1], wanted.boxes[row, :, 1])
    overlap = (low < high).all(axis=1)
    return Pieces(held[overlap], row[overlap], np.stack([low, high], axis=2)[overlap])


def _check_cover(pieces: Pieces, asked: _Table, placements: Sequence[Placement]) -> None:
    """What is held of a tensor never overlaps, so that areas that add up cover a box exactly once."""
    area = _areas(asked.boxes)
    covered = np.bincount(pieces.wanted, weights=pieces.num_elements(), minlength=len(area)).astype(np.int64)
    wrong = np.nonzero(area != covered)[0]
    assert not len(wrong), f"{placements[wrong[0]].name}: {covered[wrong[0]]} of {area[wrong[0]]} elements are held"


def _areas(boxes: Ints) -> Ints:
    """[N 2 2] -> elements [N]."""
    lengths = boxes[:, :, 1] - boxes[:, :, 0]
    return lengths[:, 0] * lengths[:, 1]
