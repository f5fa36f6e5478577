"""Owns sending metrics to Weights & Biases.

In: final numbers; out: one wandb run, which a resumed run goes on with. Must never import wandb before a sink is built,
and nothing is sent unless logging.wandb_project is set.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmegatron.metrics.optional import WANDB, require

ID_FILE = "wandb_run_id.txt"


class WandbSink:
    """One row per write; the x-axis is the metric `step`, since wandb's own counter refuses to go back on a resume."""

    def __init__(
        self,
        *,
        project: str,
        name: str,
        directory: Path | str,
        config: Mapping[str, Any],
        resumed_from: int | None,
    ) -> None:
        """Start or, when resuming, continue the wandb run whose id `directory` keeps; `config` is shown with it."""
        wandb = require(WANDB)
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=name,
            id=_run_id(directory / ID_FILE, resumed_from),
            resume="allow",
            dir=str(directory),
            config=dict(config),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one row; wandb itself does so in the background."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


def _run_id(path: Path, resumed_from: int | None) -> str:
    if resumed_from is not None and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = uuid.uuid4().hex[:16]
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
