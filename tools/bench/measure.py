"""What the benchmark makes of its measurements: shares of a step, and speeds in pairs that alternate.

In: seconds and tokens. Out: medians, ratios and their spread, as records and as plain data for JSON. Pure; must never
import torch or print.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TARGET = 0.9
OURS, BARE = "ours", "bare"
TIME = "time/"
STEP = "time/step"
REST = "(rest)"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step: median seconds, and its share of the time of all phases."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One side of a round."""

    seconds: float
    num_tokens: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Round:
    """Both sides, one right after the other."""

    ours: Timing
    bare: Timing

    @property
    def ratio(self) -> float:
        """Our speed over the bare one; tokens per second, so that answers of other lengths are no advantage."""
        return self.ours.speed / self.bare.speed


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our way beside a bare one, in rounds."""

    name: str
    baseline: str
    rounds: Sequence[Round]

    @property
    def ours(self) -> Spread:
        """Tokens per second."""
        return Spread.of([one.ours.speed for one in self.rounds])

    @property
    def bare(self) -> Spread:
        """Tokens per second."""
        return Spread.of([one.bare.speed for one in self.rounds])

    @property
    def ratio(self) -> Spread:
        """Over rounds, not of the medians: what slows the machine down for a while slows both sides of a round down."""
        return Spread.of([one.ratio for one in self.rounds])

    @property
    def met(self) -> bool:
        """Whether the median ratio reaches the target."""
        return self.ratio.median >= TARGET

    def as_data(self) -> dict[str, Any]:
        """For JSON: the summary and every round."""

        def spread(values: Spread) -> dict[str, float]:
            return {"median": values.median, "low_quartile": values.low, "high_quartile": values.high}

        def side(timing: Timing) -> dict[str, float]:
            return {"seconds": timing.seconds, "tokens": timing.num_tokens}

        return {
            "name": self.name,
            "baseline": self.baseline,
            "ours_tokens_per_s": spread(self.ours),
            "bare_tokens_per_s": spread(self.bare),
            "ratio": spread(self.ratio),
            "target": TARGET,
            "met": self.met,
            "rounds": [{OURS: side(one.ours), BARE: side(one.bare)} for one in self.rounds],
        }


def orders(num_rounds: int) -> Iterator[tuple[str, str]]:
    """Who goes first: ours, bare, bare, ours, ..., so that a steady drift of the machine favours nobody."""
    for number in range(num_rounds):
        yield (OURS, BARE) if number % 2 == 0 else (BARE, OURS)


def alternate(
    ours: Callable[[], Timing], bare: Callable[[], Timing], *, num_rounds: int, on_round: Callable[[], None]
) -> list[Round]:
    """Run both sides `num_rounds` times, after one round that only warms up; `on_round` is called after each."""
    sides = {OURS: ours, BARE: bare}
    rounds = []
    for order in orders(num_rounds + 1):
        timings = {side: sides[side]() for side in order}
        rounds.append(Round(timings[OURS], timings[BARE]))
        on_round()
    return rounds[1:]


def phases(steps: Sequence[Mapping[str, float]]) -> list[Phase]:
    """Shares from the metrics of steps, in the order of the loop; what no timer covers is the rest. Shares sum to 1.

    A phase is timed on its slowest rank, so together phases may exceed a step; then there is no rest.
    """
    names = _outer(steps)
    seconds = {name.removeprefix(TIME): [step.get(name, 0.0) for step in steps] for name in names}
    seconds[REST] = [max(0.0, step[STEP] - sum(step.get(name, 0.0) for name in names)) for step in steps]
    total = sum(sum(values) for values in seconds.values())
    return [Phase(name, statistics.median(values), sum(values) / total) for name, values in seconds.items()]


def _outer(steps: Sequence[Mapping[str, float]]) -> list[str]:
    """`time/update` but not `time/update/actor`, and not the step itself."""
    names = dict.fromkeys(name for step in steps for name in step)
    return [name for name in names if name.startswith(TIME) and name.count("/") == 1 and name != STEP]
