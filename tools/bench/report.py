"""What the benchmark shows: tables for a person, plain data for a file.

In: phases, comparisons and facts of the machine. Out: rich tables, or a dict for JSON. Must never measure anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.measure import TARGET, Comparison, Phase, Spread
from rich.table import Table


def phase_table(found: Sequence[Phase], *, num_steps: int) -> Table:
    """One row a phase."""
    table = Table(title=f"a step's time ({num_steps} steps)", title_justify="left")
    table.add_column("phase")
    table.add_column("median", justify="right")
    table.add_column("share", justify="right")
    for phase in found:
        table.add_row(phase.name, f"{phase.seconds:.3f} s", f"{phase.share:.1%}")
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One row a comparison: medians, and the ratio with its quartiles."""
    table = Table(title="tokens per second beside the bare libraries, round by round", title_justify="left")
    for name in ("what", "beside", "rounds", "ours", "bare", "ours / bare", f"at least {TARGET:.0%}"):
        table.add_column(name, justify="left" if name in ("what", "beside") else "right")
    for one in comparisons:
        verdict = "[green]met[/]" if one.met else "[bold red]missed[/]"
        table.add_row(
            one.name,
            one.baseline,
            str(len(one.rounds)),
            f"{one.ours.median:,.0f}",
            f"{one.bare.median:,.0f}",
            _percent(one.ratio),
            verdict,
        )
    return table


def as_data(found: Sequence[Phase], comparisons: Sequence[Comparison], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        **facts,
        "phases": [asdict(phase) for phase in found],
        "comparisons": [one.as_data() for one in comparisons],
    }


def _percent(ratio: Spread) -> str:
    return f"{ratio.median:.1%} ({ratio.low:.0%} to {ratio.high:.0%})"
