"""Owns what a sink of metrics is, and writing to several of them.

In: a step and its final numbers by name; out: whatever each sink makes of them. Must never reduce anything, and only
rank 0 holds a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Sink(Protocol):
    """A place that metrics go to."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step; several calls may belong to one step (training, then evaluation)."""
        ...

    def close(self) -> None:
        """Make everything written durable; nothing is written afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class FanOut:
    """Several sinks as one: a sink that fails does not keep the others from their turn, and then stops the run."""

    sinks: Sequence[Sink]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write to every sink; raises what failed, with the sink's name."""
        self._each(f"write step {step}", lambda sink: sink.write(step, metrics))

    def close(self) -> None:
        """Close every sink; raises what failed, with the sink's name."""
        self._each("close", lambda sink: sink.close())

    def _each(self, action: str, act: Callable[[Sink], None]) -> None:
        errors: list[Exception] = []
        for sink in self.sinks:
            try:
                act(sink)
            except Exception as error:
                error.add_note(f"{type(sink).__name__} could not {action}")
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{len(errors)} sinks could not {action}", errors)
