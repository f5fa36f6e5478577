"""Owns building the sinks that a run's configuration asks for.

In: the logging section and a few values; out: one `FanOut`. Must never see the rest of the configuration, except as
plain data to show beside the metrics; called on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmegatron.config.schema import LoggingConfig
from rlmegatron.metrics.console import ConsoleSink
from rlmegatron.metrics.jsonl import JsonlSink
from rlmegatron.metrics.mlflow import MLflowSink
from rlmegatron.metrics.sinks import FanOut, Sink
from rlmegatron.metrics.tensorboard import TensorBoardSink
from rlmegatron.metrics.wandb import WandbSink


def build_sinks(
    logging: LoggingConfig,
    *,
    directory: Path | str,
    run_name: str,
    total_steps: int,
    resumed_from: int | None,
    run_config: Mapping[str, Any],
) -> FanOut:
    """metrics.jsonl always, the others as configured; `resumed_from` is the restored step, None for a fresh run.

    Raises ValueError for a sink whose package is not installed.
    """
    directory = Path(directory)
    remote: dict[str, Any] = {
        "name": run_name,
        "directory": directory,
        "config": run_config,
        "resumed_from": resumed_from,
    }
    sinks: list[Sink] = []
    if logging.wandb_project is not None:
        sinks.append(WandbSink(project=logging.wandb_project, **remote))
    if logging.mlflow_uri is not None:
        sinks.append(MLflowSink(uri=logging.mlflow_uri, **remote))
    if logging.tensorboard:
        sinks.append(TensorBoardSink(directory / "tensorboard", resumed_from=resumed_from))
    sinks.append(JsonlSink(directory / "metrics.jsonl", resumed_from=resumed_from))
    if logging.console:
        sinks.append(ConsoleSink(total_steps=total_steps))
    return FanOut(sinks)
