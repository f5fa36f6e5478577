"""Owns sending metrics to an MLflow tracking server (or directory).

In: final numbers; out: one MLflow run, which a resumed run goes on with. Must never import mlflow before a sink is
built, and nothing is sent unless logging.mlflow_uri is set.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmegatron.metrics.optional import MLFLOW, require

ID_FILE = "mlflow_run_id.txt"
BATCH = 1000
"""Metrics that MLflow accepts in one call."""


class MLflowSink:
    """One point per metric and step, in the experiment `rlmegatron`."""

    def __init__(
        self,
        *,
        uri: str,
        name: str,
        directory: Path | str,
        config: Mapping[str, Any],
        resumed_from: int | None,
    ) -> None:
        """Start or, when resuming, continue the MLflow run whose id `directory` keeps; `config` is stored with it."""
        mlflow = require(MLFLOW)
        self._metric = require(MLFLOW, module="mlflow.entities").Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        id_file = Path(directory) / ID_FILE
        id_file.parent.mkdir(parents=True, exist_ok=True)
        if resumed_from is not None and id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(self._experiment("rlmegatron"), run_name=name).info.run_id
        id_file.write_text(self._run_id + "\n", encoding="utf-8")
        self._client.log_dict(self._run_id, dict(config), "config.json")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        now = int(time.time() * 1000)
        points = [self._metric(name, value, now, step) for name, value in metrics.items()]
        for start in range(0, len(points), BATCH):
            self._client.log_batch(self._run_id, metrics=points[start : start + BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))
