"""How processes share the groups of a conversion, and what the first of them shows of it.

In: groups, and a journal that knows which are done. Out: work done group by group, with a progress bar and the time
that is left. Must never know what the work is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from rlmegatron.conversion.canonical import Group
from rlmegatron.conversion.journal import Journal
from rlmegatron.distributed.world import World

_SECONDS_BETWEEN_LINES = 10.0  # where nobody watches, the bar is shown again each time so much has passed


class Progress:
    """A bar and lines on standard error, on rank 0 alone."""

    def __init__(self, world: World, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown and world.is_lead
        self._share = "" if world.size == 1 else f" (rank 0 of {world.size})"
        self._bar: Any = None

    def start(self, phase: str, num_bytes: int) -> None:
        """A phase begins, in which so much is to be done."""
        self.stop()
        self._bar = tqdm(
            total=num_bytes,
            desc=phase + self._share,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not self._is_shown,
            mininterval=0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES,
        )

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
    """The groups that this rank has yet to do: every size-th of those that are left, or of all with `again`."""

    def __init__(self, world: World, journal: Journal, groups: Sequence[Group], *, again: bool = False) -> None:
        self._world, self._journal = world, journal
        left = world.lead(lambda: [number for number in range(len(groups)) if again or not journal.has(number)])
        self._mine = [(number, groups[number]) for number in left[world.rank :: world.size]]

    def each(self, phase: str, work: Callable[[int, Group], None], say: Progress) -> None:
        """Do them one after the other. Collective; when one rank fails, the others end with the group they are at."""
        say.start(phase, sum(group.num_bytes for _, group in self._mine))
        self._world.settle(f"the {phase}", lambda: self._each(work))
        say.stop()

    def _each(self, work: Callable[[int, Group], None]) -> None:
        for number, group in self._mine:
            if self._journal.is_called_off():
                return
            try:
                work(number, group)
            except BaseException:
                self._journal.call_off()
                raise
