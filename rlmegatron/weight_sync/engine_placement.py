"""One box of a Hugging Face tensor and where an engine's model holds it, as data.

In: a tensor and the share of it that a rank has. Out: `Placement`s. Pure; must never import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmegatron.models.rules import Box, Part
from rlmegatron.weight_sync.engine_rank import Share


@dataclass(frozen=True, slots=True)
class Home:
    """`parameter[box]` of the engine's model: a parameter, or an attribute path to a tensor derived from one."""

    parameter: str
    box: Box
    shape: tuple[int | None, ...]
    """The parameter's, padding included; None where it may differ."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`tensor(name)[source]` lies in the first of `homes` that the engine has, its elements in the same order.

    A home may have leading dimensions of length 1 that the tensor lacks, such as the number of an expert. What
    `is_derived` is a copy that SGLang makes of another placement's elements: compared, and never written.
    """

    name: str
    source: Box
    homes: tuple[Home, ...]
    is_derived: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter, where in it along the cut dimension a tensor's share begins, and how long that is in all: as long as
    the share's room where `room` is None. `lead` are the leading dimensions, of sizes `lead_sizes`."""

    parameter: str
    offset: int = 0
    room: int | None = None
    lead: Box = ()
    lead_sizes: tuple[int | None, ...] = ()


def whole(part: Part, *, parameter: str | None = None, offset: int = 0, rows: int | None = None) -> Placement:
    """All of `part`, from row `offset` of the parameter, which has the tensor's own name and `rows` unless others are
    given."""
    length, rest = part.shape[0], part.shape[1:]
    home = Home(parameter or part.name, ((offset, offset + length), *_whole(rest)), (rows or length, *rest))
    return Placement(part.name, _whole(part.shape), (home,))


def cut(part: Part, dim: int, share: Share, *slots: Slot) -> Iterator[Placement]:
    """The share of `part` along `dim`, in the first of `slots` that exists; nothing where all of it is padding."""
    length = share.stop - share.start
    if length:
        homes = tuple(_home(part, dim, length, share, slot) for slot in slots)
        yield Placement(part.name, _along(part, dim, share.start, length), homes)


def _home(part: Part, dim: int, length: int, share: Share, slot: Slot) -> Home:
    room = share.room if slot.room is None else slot.room
    shape = (room if i == dim else size for i, size in enumerate(part.shape))
    return Home(slot.parameter, slot.lead + _along(part, dim, slot.offset, length), (*slot.lead_sizes, *shape))


def within(module: str, placement: Placement) -> Placement:
    """The same, where the names of the tensor and its homes begin with `module`."""
    homes = tuple([Home(module + home.parameter, home.box, home.shape) for home in placement.homes])
    return Placement(module + placement.name, placement.source, homes, placement.is_derived)


def _along(part: Part, dim: int, start: int, length: int) -> Box:
    return tuple((start, start + length) if i == dim else (0, size) for i, size in enumerate(part.shape))


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)
