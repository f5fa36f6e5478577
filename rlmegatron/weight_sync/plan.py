"""Which part of which training parameter goes where in one rank of an engine: the reshard as a table of numbers.

In: the parameter rules, the layout of a replica and what the engine's rank wants. Out: `Pieces`, which cover every
wanted element exactly once. Pure; must never import torch or communicate.

A piece is the intersection of what a training rank holds with what the engine's rank wants: a box of one Hugging Face
tensor, which lies in one rectangle of a parameter on either side. Who gives it, where several ranks hold it, is chosen
in `sources.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.models.rules import Box, Rule

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """`parameters[parameter][home] = tensor(name)[source]` in an engine's rank; `width` is the parameter's row length.

    `home` is a box of the parameter seen as a matrix of rows of `width` elements.
    """

    name: str
    source: Box
    parameter: int
    home: Box
    width: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """N pieces of one engine rank, a column of N each.

    `rule` names the training parameter, which is held by pipeline rank `stage`; by rank `shard` of the axis that cuts
    it, or by all alike (-1); and by the ranks that have expert `expert`, or that of none (-1). There the piece is the
    rectangle of `rows` x `columns` elements at (`source_row`, `source_column`), and in parameter `parameter` of the
    engine the one at (`row`, `column`); `source_width` and `width` are the lengths of a row of each parameter.
    """

    rule: Ints
    stage: Ints
    shard: Ints
    expert: Ints
    source_row: Ints
    source_column: Ints
    source_width: Ints
    parameter: Ints
    row: Ints
    column: Ints
    width: Ints
    rows: Ints
    columns: Ints

    def __len__(self) -> int:
        return len(self.rule)

    def num_elements(self) -> Ints:
        """[N]."""
        return self.rows * self.columns

    def take(self, index: Ints | npt.NDArray[np.bool_]) -> Pieces:
        """Those pieces alone."""
        return Pieces(*(getattr(self, field.name)[index] for field in fields(self)))


def plan_pieces(
    rules: Sequence[Rule], wanted: Sequence[Wanted], layout: ReplicaLayout, *, stage_of: Callable[[Rule], int]
) -> Pieces:
    """Cover `wanted` with what the ranks of a replica hold; AssertionError where that is impossible."""
    names = {one.name for one in wanted}
    numbers = {name: number for number, name in enumerate(names)}
    held = _Table.of(list(_held(rules, layout, stage_of, numbers)))
    asked = _Table.of([(numbers[one.name], one.source, one.home, (one.parameter, one.width)) for one in wanted])
    rows, want = _overlapping(held, asked)
    low = np.maximum(held.boxes[rows, :, 0], asked.boxes[want, :, 0])
    high = np.minimum(held.boxes[rows, :, 1], asked.boxes[want, :, 1])
    is_real = (low < high).all(axis=1)
    rows, want, low, high = rows[is_real], want[is_real], low[is_real], high[is_real]
    _check_cover(want, (high - low).prod(axis=1), asked, wanted)
    source = held.targets[rows, :, 0] + low - held.boxes[rows, :, 0]
    home = asked.targets[want, :, 0] + low - asked.boxes[want, :, 0]
    rule, stage, shard, expert, source_width = held.facts[rows].T
    parameter, width = asked.facts[want].T
    return Pieces(
        *(rule, stage, shard, expert, source[:, 0], source[:, 1], source_width),
        *(parameter, home[:, 0], home[:, 1], width, *(high - low).T),
    )


_Row = tuple[int, Box, Box, tuple[int, ...]]
"""Tensor number, box in the tensor, box in a parameter, and facts."""


def _held(
    rules: Sequence[Rule], layout: ReplicaLayout, stage_of: Callable[[Rule], int], numbers: dict[str, int]
) -> Iterator[_Row]:
    for number, rule in enumerate(rules):
        if rule.copy:
            continue
        size = layout.tp if rule.axis == "tp" else layout.etp
        stage, expert = stage_of(rule), -1 if rule.expert is None else rule.expert
        width = rule.local_shape(size)[-1]
        for shard in (-1,) if rule.dim is None else range(size):
            for piece in rule.pieces(size=size, rank=max(shard, 0)):
                if piece.name in numbers:
                    facts = (number, stage, shard, expert, width)
                    yield numbers[piece.name], piece.source, piece.target, facts


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows as columns: tensor numbers [M], boxes in tensor and parameter [M 2 2], facts [M F]. Vectors are one row."""

    tensor: Ints
    boxes: Ints
    targets: Ints
    facts: Ints

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> _Table:
        tensors = np.array([tensor for tensor, *_ in rows], dtype=np.int64)
        boxes = np.array([_of_matrix(box) for _, box, _, _ in rows], dtype=np.int64)
        targets = np.array([_of_matrix(target) for _, _, target, _ in rows], dtype=np.int64)
        facts = np.array([facts for *_, facts in rows], dtype=np.int64)
        return cls(tensors, boxes.reshape(-1, 2, 2), targets.reshape(-1, 2, 2), facts.reshape(len(rows), -1))


def _of_matrix(box: Box) -> Box:
    return box if len(box) == 2 else ((0, 1), *box)


def _overlapping(held: _Table, asked: _Table) -> tuple[Ints, Ints]:
    """Rows of both tables that speak of one tensor, in the order of what is asked."""
    order = np.argsort(held.tensor, kind="stable")
    keys = held.tensor[order]
    first, last = (np.searchsorted(keys, asked.tensor, side=side) for side in ("left", "right"))
    want, place = runs(first, last)
    return order[place], want


def runs(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """The numbers from `first[i]` to before `last[i]` for every i, in a row: [R] their i, and [R] themselves."""
    counts = last - first
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, np.repeat(first, counts) + within


def _check_cover(want: Ints, sizes: Ints, asked: _Table, wanted: Sequence[Wanted]) -> None:
    """What is held of a tensor never overlaps, so that areas that add up cover a box exactly once."""
    area = (asked.boxes[:, :, 1] - asked.boxes[:, :, 0]).prod(axis=1)
    covered = np.bincount(want, weights=sizes, minlength=len(area)).astype(np.int64)
    wrong = np.nonzero(area != covered)[0]
    assert not len(wrong), f"{wanted[wrong[0]].name}: {covered[wrong[0]]} of {area[wrong[0]]} elements are held"
