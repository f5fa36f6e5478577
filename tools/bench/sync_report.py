"""What the benchmark of the weight sync shows: a table for a person, plain data for a file.

In: what was measured and facts of the run. Out: a rich table, or a dict for JSON. Must never measure anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.kernel_speed import KernelSpeed
from bench.measure import Spread
from bench.sync_measure import Measured, times_faster
from rich.table import Table

_COLUMNS = (
    "transport",
    "first call, s",
    "later calls, s",
    "faster than {reference}",
    "received",
    "over bound",
    "extra memory",
    "messages",
    "bits",
)


@dataclass(frozen=True)
class Report:
    """`bound` are the bytes that a rank cannot do without receiving; `left_out` says why, by name of a side."""

    facts: Mapping[str, Any]
    sides: Sequence[Measured]
    reference: str
    bound: int
    left_out: Mapping[str, str]
    kernel: KernelSpeed | None = None

    def table(self) -> Table:
        """One row a side; of ranks the one with most."""
        table = Table(title=self._title(), title_justify="left")
        for name in _COLUMNS:
            table.add_column(name.format(reference=self.reference), justify="left" if name == "transport" else "right")
        for side in self.sides:
            table.add_row(*self._row(side))
        return table

    def lines(self) -> list[str]:
        """What the table has no place for."""
        found = [f"{name} was left out: {reason}" for name, reason in self.left_out.items()]
        if self.kernel is not None:
            ours, plain = median(self.kernel.kernel), median(self.kernel.plain)
            what = f"{_megabytes(self.kernel.num_bytes)} in {self.kernel.num_segments} segments"
            found.append(
                f"kernel, one engine rank of {what}: "
                f"{ours / 1e9:,.0f} GB/s, {ours / plain:.1%} of a plain copy's {plain / 1e9:,.0f} GB/s"
            )
        return found

    def as_data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        data: dict[str, Any] = {
            **self.facts,
            "bound_bytes": self.bound,
            "transports": [side.as_data(self._reference(), self.bound) for side in self.sides],
            "left_out": dict(self.left_out),
        }
        if self.kernel is not None:
            data["kernel"] = {
                "bytes": self.kernel.num_bytes,
                "segments": self.kernel.num_segments,
                "kernel_bytes_per_s": self.kernel.kernel,
                "plain_bytes_per_s": self.kernel.plain,
            }
        return data

    def _title(self) -> str:
        facts = self.facts
        return (
            f"{facts['layout']} on {facts['ranks']} ranks, {facts['family']} of {facts['bytes'] / 1e9:.2f} GB "
            f"({facts['dtype']}), {len(self.sides[0].rounds_s)} rounds; a rank must receive {_megabytes(self.bound)}"
        )

    def _reference(self) -> Measured | None:
        return next((side for side in self.sides if side.name == self.reference), None)

    def _row(self, side: Measured) -> list[str]:
        reference = self._reference()
        most = max(side.received)
        return [
            side.name,
            f"{side.first_s:.3f}",
            _seconds(Spread.of(side.rounds_s)),
            "" if reference is None else _times(times_faster(side, reference)),
            _megabytes(most),
            f"{most / self.bound:.2f}x" if self.bound else "",
            _megabytes(max(side.extra_bytes)),
            str(max(side.messages)),
            "equal" if side.is_checked else "unchecked",
        ]


def _seconds(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _times(spread: Spread) -> str:
    return f"{spread.median:.1f}x ({spread.low:.1f} to {spread.high:.1f})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
