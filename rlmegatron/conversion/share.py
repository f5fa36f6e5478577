"""How processes share the groups of a conversion, and what the first of them shows of it.

In: groups and who is done. Out: work done group by group, with a progress bar and the time that is left. Must never
know what the work is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from rlmegatron.conversion.canonical import Group
from rlmegatron.distributed.world import World

_SECONDS_BETWEEN_LINES = 10.0  # where nobody watches, a bar is one line each time it moves


class Progress:
    """A bar and lines on standard error, on rank 0 alone."""

    def __init__(self, world: World, *, is_shown: bool = True) -> None:
        self._world, self._is_shown = world, is_shown and world.is_lead
        self._bar: Any = None
        self._title = ""

    def bar(self, title: str) -> Callable[[int], None]:
        """What starts the bar of a phase, given its bytes."""
        share = "" if self._world.size == 1 else f" (rank 0 of {self._world.size})"

        def start(num_bytes: int) -> None:
            self.stop()
            self._bar = tqdm(
                total=num_bytes,
                desc=title + share,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=not self._is_shown,
                mininterval=0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES,
            )

        return start

    def advance(self, num_bytes: int) -> None:
        """So much more is done."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def lines(self, lines: Sequence[str]) -> None:
        """Say something above the bar."""
        for line in lines if self._is_shown else ():
            tqdm.write(line, file=sys.stderr)

    def stop(self) -> None:
        """The phase is over."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Share:
    """The groups that this rank has yet to do: every size-th of those that are left."""

    def __init__(self, world: World, groups: Sequence[Group], *, done: Callable[[int], bool]) -> None:
        left = world.lead(lambda: [number for number in range(len(groups)) if not done(number)])
        self._mine = [(number, groups[number]) for number in left[world.rank :: world.size]]

    def each(self, work: Callable[[int, Group], None], start_bar: Callable[[int], None]) -> None:
        """Do them one after the other."""
        start_bar(sum(group.num_bytes for _, group in self._mine))
        for number, group in self._mine:
            work(number, group)
