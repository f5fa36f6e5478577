"""What the runs of a sweep achieved: read from a run directory, kept beside it, and shown as one table.

In: run directories with `metrics.jsonl` and `config.yaml`. Out: `Result`, results.json and a Markdown table. Must never
start anything nor import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from quickstart.report import ACCURACY, Row, first_and_last_evaluation, read_rows

from rlmegatron.config.load import load

SAMPLED = "eval/test/sampled_accuracy"
LOGP_DIFFERENCE = "rollout/logp_diff_max"
PROMPTS_TRIED = "dynamic_sampling/prompts_tried"
COLUMNS = (
    "preset",
    "seeds",
    "greedy before",
    "greedy after",
    "sampled after (avg@n, pass@1)",
    "steps",
    "seconds",
    "answers",
    "largest log p difference",
)


@dataclass(frozen=True)
class Result:
    """One finished run; accuracies are shares of the held-out problems."""

    preset: str
    seed: int
    greedy_before: float
    greedy_after: float
    sampled_after: float
    """Mean over all sampled answers: avg@n, which is also pass@1."""
    steps: int
    seconds: float
    """Wall time of the training job, evaluations included."""
    answers: int
    """Answers generated for training, also those that were not learnt from and the greedy ones of ReMax."""
    largest_logp_difference: float
    """Between engine and learner, over all tokens of all steps, in nats."""

    @property
    def line(self) -> str:
        """One line about the run."""
        return (
            f"{self.preset} seed {self.seed}: accuracy {self.greedy_before:.2f} -> {self.greedy_after:.2f} "
            f"(sampled {self.sampled_after:.2f}), {self.steps} steps, {self.seconds:.0f} s"
        )


def read_result(run: Path, *, preset: str, seed: int, seconds: float) -> Result:
    """The result of a finished run; raises ValueError when its files do not hold it."""
    rows = read_rows(run)
    before, after = first_and_last_evaluation(run, rows)
    steps = [row for row in rows if LOGP_DIFFERENCE in row]
    if SAMPLED not in after or not steps:
        raise ValueError(f"{run / 'metrics.jsonl'} lacks {SAMPLED} or {LOGP_DIFFERENCE}")
    return Result(
        preset=preset,
        seed=seed,
        greedy_before=before[ACCURACY],
        greedy_after=after[ACCURACY],
        sampled_after=after[SAMPLED],
        steps=after["step"],
        seconds=seconds,
        answers=_answers(run, steps),
        # null in the file where it was not finite
        largest_logp_difference=max(math.inf if (x := row[LOGP_DIFFERENCE]) is None else x for row in steps),
    )


def _answers(run: Path, steps: Sequence[Row]) -> int:
    config = load(run / "config.yaml")
    prompts = (row.get(PROMPTS_TRIED, config.rollout.prompts_per_step) for row in steps)
    return int(sum(prompts)) * (config.rollout.samples_per_prompt + config.algorithm.traits.uses_greedy)


def keep(path: Path, *, settings: dict[str, Any], result: Result) -> None:
    """Write the result of a run and the settings that it had; `recall` gives it back for the same settings."""
    _write(path, json.dumps({"settings": settings, "result": asdict(result)}, indent=2) + "\n")


def recall(path: Path, *, settings: dict[str, Any] | None = None) -> Result | None:
    """What `keep` wrote; None where there is nothing, or where the settings were others (None: any)."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    if settings is not None and kept["settings"] != settings:
        return None
    return Result(**kept["result"])


def write_results(directory: Path, results: Sequence[Result]) -> str:
    """Write results.json and table.md; returns the table."""
    table = markdown_table(results)
    _write(directory / "results.json", json.dumps([asdict(result) for result in results], indent=2) + "\n")
    _write(directory / "table.md", table)
    return table


def markdown_table(results: Iterable[Result]) -> str:
    """A row for each preset in the order given, with one number a seed."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for preset, group in groupby(results, key=lambda result: result.preset):
        of_seeds = list(group)
        lines.append(
            (
                f"`{preset}`",
                _listed(str(one.seed) for one in of_seeds),
                _listed(_share(one.greedy_before) for one in of_seeds),
                _listed(_share(one.greedy_after) for one in of_seeds),
                _listed(_share(one.sampled_after) for one in of_seeds),
                _listed(dict.fromkeys(str(one.steps) for one in of_seeds)),
                _listed(f"{one.seconds:.0f}" for one in of_seeds),
                _listed(dict.fromkeys(f"{one.answers:,}".replace(",", " ") for one in of_seeds)),
                f"{max(one.largest_logp_difference for one in of_seeds):.0e}",
            )
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(texts)


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
