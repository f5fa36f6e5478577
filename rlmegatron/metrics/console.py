"""Owns the line per step that a person watches.

In: final numbers; out: one aligned line per training step and one per evaluation, coloured on a terminal and plain
elsewhere. Must never wrap, crop or redraw a line: the same output has to read well in a log file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Column:
    """One number of the line: the metric it shows, its label, and its format."""

    metric: str
    label: str
    format: str

    def show(self, metrics: Mapping[str, float]) -> tuple[str, bool]:
        """Its text, of the same width for every step, and whether the number is one to worry about (not finite)."""
        width = len(format(0.0, self.format))
        if self.metric not in metrics:
            return f"{self.label} {'-':>{width}}", False
        value = metrics[self.metric]
        return f"{self.label} {format(value, self.format):>{width}}", not math.isfinite(value)


COLUMNS = (
    Column("reward/mean", "reward", "7.3f"),
    Column("reward/accuracy", "acc", "5.3f"),
    Column("response/length_mean", "len", "7.1f"),
    Column("actor/kl_ref", "kl", "9.2e"),
    Column("actor/entropy", "ent", "6.3f"),
    Column("actor/loss", "loss", "8.4f"),
    Column("perf/tokens_per_s", "tok/s", "9,.0f"),
)
EVAL_PREFIX = "eval/"
TIME_PREFIX = "time/"


class ConsoleSink:
    """Prints to stdout, or to `console`."""

    def __init__(
        self, *, total_steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total_steps`: the step at which the run is done, for the time to go (mean of the steps seen so far)."""
        self._total_steps = total_steps
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, and one of its evaluation when there is one."""
        if any(not name.startswith(EVAL_PREFIX) for name in metrics):
            self._print(self._step_line(step, metrics))
        evaluated = {name: value for name, value in metrics.items() if name.startswith(EVAL_PREFIX)}
        if evaluated:
            self._print(self._eval_line(step, evaluated))

    def close(self) -> None:
        """Nothing to do: every line was printed when it came."""

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> Text:
        cells = [self._head("step", step)]
        for column in COLUMNS:
            shown, worrying = column.show(metrics)
            cells.append(Text(shown, style="bold red" if worrying else ""))
        cells += [Text(_phases(metrics), style="dim"), Text(f"eta {self._time_to_go(step, metrics)}", style="dim")]
        return Text(" | ").join(cell for cell in cells if cell.plain)

    def _eval_line(self, step: int, evaluated: Mapping[str, float]) -> Text:
        cells = [f"{name.removeprefix(EVAL_PREFIX)} {_short(value)}" for name, value in evaluated.items()]
        return Text(" | ").join([self._head("eval", step), *[Text(cell, style="green") for cell in cells]])

    def _head(self, word: str, step: int) -> Text:
        width = len(str(self._total_steps))
        return Text(f"{word} {step:>{width}}/{self._total_steps}", style="bold")

    def _time_to_go(self, step: int, metrics: Mapping[str, float]) -> str:
        if self._first is None:
            # When the first line comes, its step's own phases are all the time there is to go by.
            seconds = sum(value for name, value in metrics.items() if _is_phase(name))
            self._first = (step - 1, self._clock() - seconds)
        first_step, started = self._first
        per_step = (self._clock() - started) / max(step - first_step, 1)
        return _duration(per_step * max(self._total_steps - step, 0))

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


def _is_phase(name: str) -> bool:
    """Whether this is the time of an outermost phase: `time/update`, not `time/update/actor` within it."""
    return name.startswith(TIME_PREFIX) and name.count("/") == 1


def _phases(metrics: Mapping[str, float]) -> str:
    return " ".join(
        f"{name.removeprefix(TIME_PREFIX)} {value:.2f}s" for name, value in metrics.items() if _is_phase(name)
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value == round(value, 0) and abs(value) >= 10 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
