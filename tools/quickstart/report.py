"""The last line of the quickstart: what the run achieved, from its `metrics.jsonl`.

In: a run directory and the seconds it took. Out: one line on the console. Must never import anything heavy.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ACCURACY, NUM_PROMPTS = "eval/test/greedy_accuracy", "eval/test/num_prompts"

Row = dict[str, Any]


def report(run: Path, *, seconds: int) -> str:
    """The line; raises ValueError when the metrics hold no evaluation before or after training."""
    first, last = first_and_last_evaluation(run, read_rows(run))
    return (
        f"quickstart: accuracy {first[ACCURACY]:.2f} -> {last[ACCURACY]:.2f} on {last[NUM_PROMPTS]:.0f} held-out "
        f"problems, {last['step']} steps, {seconds} s, run {run}"
    )


def read_rows(run: Path) -> list[Row]:
    """The rows of the run's metrics.jsonl; raises ValueError when there is none."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{metrics} does not exist")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def first_and_last_evaluation(run: Path, rows: list[Row]) -> tuple[Row, Row]:
    """The evaluations before and after training; raises ValueError when they are not of two steps."""
    evaluations = [row for row in rows if ACCURACY in row]
    if len({row["step"] for row in evaluations}) < 2:
        metrics = run / "metrics.jsonl"
        raise ValueError(f"{metrics} needs {ACCURACY} at two steps or more, it has {len(evaluations)}")
    return evaluations[0], evaluations[-1]


def main() -> int:
    """Print the line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Print the quickstart's result line.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--seconds", type=int, required=True, help="how long the training job took")
    arguments = parser.parse_args()
    try:
        print(report(arguments.run, seconds=arguments.seconds))
    except ValueError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
