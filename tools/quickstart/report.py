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


def report(run: Path, *, seconds: int) -> str:
    """The line; raises ValueError when the metrics hold no evaluation before or after training."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{metrics} does not exist")
    rows: list[dict[str, Any]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [row for row in rows if ACCURACY in row]
    if len({row["step"] for row in evaluations}) < 2:
        raise ValueError(f"{metrics} needs {ACCURACY} at two steps or more, it has {len(evaluations)}")
    first, last = evaluations[0], evaluations[-1]
    return (
        f"quickstart: accuracy {first[ACCURACY]:.2f} -> {last[ACCURACY]:.2f} on {last[NUM_PROMPTS]:.0f} held-out "
        f"problems, {last['step']} steps, {seconds} s, run {run}"
    )


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
