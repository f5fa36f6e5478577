"""The parameters that an engine's rank really has, as it described them, and where each tensor belongs among them.

In: a description by name and the placements that the layout expects. Out: `Wanted` boxes, or a ValueError that names
what does not fit. Pure; must never import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from rlmegatron.models.rules import Box
from rlmegatron.weight_sync.engine_placement import Placement
from rlmegatron.weight_sync.plan import Wanted


@dataclass(frozen=True, slots=True)
class EngineParameters:
    """`names[i]` has `shapes[i]` and elements of `dtypes[i]`, a name such as 'float32'."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> EngineParameters:
        """From name -> [shape, dtype], as `engine_worker.describe` writes it."""
        shapes = tuple(tuple(shape) for shape, _ in description.values())
        return cls(tuple(description), shapes, tuple(dtype for _, dtype in description.values()))

    @classmethod
    def expected(cls, placements: Iterable[Placement], dtype: str) -> EngineParameters:
        """Those of an engine that has every first home and nothing more, to plan without one."""
        shapes = least_shapes(placement for placement in placements if not placement.is_derived)
        return cls(tuple(shapes), tuple(shapes.values()), (dtype,) * len(shapes))

    def wanted(
        self, placements: Iterable[Placement], *, of_first: Callable[[], Iterable[Placement]] = lambda: ()
    ) -> list[Wanted]:
        """Where everything that is not derived goes; ValueError for a placement without home, for one that does not
        fit, and for a parameter of which no placement knows.

        `of_first` gives those of the engine's first rank, which has a share of everything: a parameter that is known
        from those alone is padding here.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        found = [self._place(placement, numbers) for placement in placements if not placement.is_derived]
        unknown = sorted(set(range(len(self.names))) - {one.parameter for one in found})
        if unknown:
            known = {home.parameter for placement in of_first() for home in placement.homes}
            unknown = [number for number in unknown if self.names[number] not in known]
        if unknown:
            shown = ", ".join(f"{self.names[number]} {list(self.shapes[number])}" for number in unknown[:3])
            raise ValueError(
                f"the engine has {len(unknown)} parameters that no rule covers: {shown}; teach "
                "rlmegatron/weight_sync/engine_layout.py where they come from, or use weight_sync.transport: hf_stream"
            )
        return found

    def _place(self, placement: Placement, numbers: Mapping[str, int]) -> Wanted:
        home = next((home for home in placement.homes if home.parameter in numbers), None)
        if home is None:
            raise ValueError(
                f"{placement.name}: the engine has no {' and no '.join(home.parameter for home in placement.homes)}; "
                "does it run another model, or another version of it?"
            )
        number = numbers[home.parameter]
        shape = self.shapes[number]
        should = [size if known is None else known for size, known in zip(shape, home.shape, strict=False)]
        if len(shape) != len(home.shape) or list(shape) != should or _ends_outside(home.box, shape):
            raise ValueError(
                f"{placement.name}: the engine's {home.parameter} of shape {list(shape)} should be "
                f"{list(home.shape)}; does it run another model, or another version of it?"
            )
        return Wanted(placement.name, placement.source, number, as_matrix(home.box, shape), shape[-1])

    def padded(self, wanted: Sequence[Wanted]) -> list[int]:
        """Numbers of the parameters that have elements beyond what is wanted: padding, which SGLang keeps at zero."""
        covered = np.zeros(len(self.names), dtype=np.int64)
        for one in wanted:
            covered[one.parameter] += prod(stop - start for start, stop in one.home)
        return [number for number, shape in enumerate(self.shapes) if covered[number] < prod(shape)]


def least_shapes(placements: Iterable[Placement]) -> dict[str, tuple[int, ...]]:
    """Of the parameter of every first home; where the layout leaves a size open, the smallest that has all boxes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for placement in placements:
        home = placement.homes[0]
        known = shapes.get(home.parameter, (0,) * len(home.box))
        ends = zip(known, home.box, home.shape, strict=True)
        shapes[home.parameter] = tuple(size or max(most, stop) for most, (_, stop), size in ends)
    return shapes


def _ends_outside(box: Box, shape: Sequence[int]) -> bool:
    return any(stop > size for (_, stop), size in zip(box, shape, strict=True))


def as_matrix(box: Box, shape: Sequence[int]) -> Box:
    """A box whose leading dimensions have length 1, in the tensor of `shape` seen as a matrix."""
    if len(box) < 3:
        return box
    *lead, (first, last), columns = box
    row = 0
    for (start, stop), size in zip(lead, shape, strict=False):
        assert stop - start == 1, f"{box} spans several matrices of {list(shape)}"
        row = row * size + start
    row *= shape[-2]
    return ((row + first, row + last), columns)
