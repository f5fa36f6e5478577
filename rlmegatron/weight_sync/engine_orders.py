"""How a lead rank gives an order to every worker of its engine and reads the answers.

In: an engine with an open weight update, one order per rank. Out: one answer per rank, or an EngineError that says
which worker could not do what. Must never know what the orders mean.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmegatron.rollout.api import EngineError, RolloutEngine
from rlmegatron.weight_sync.engine_worker import ORDER


def ask(
    engine: RolloutEngine,
    loader: str,
    orders: Sequence[Mapping[str, Any]],
    tensors: Mapping[str, Sequence[Tensor]] | None = None,
) -> list[Any]:
    """The answer of every worker to its order; `tensors` are handed over as well, one of each name per worker."""
    with tempfile.TemporaryDirectory(prefix="rlmegatron_orders_") as directory:
        paths = [Path(directory) / f"{rank}.json" for rank in range(len(orders))]
        texts = [_as_bytes({**order, "path": str(path)}) for path, order in zip(paths, orders, strict=True)]
        engine.update_weights([(ORDER, texts), *(tensors or {}).items()], load_format=loader)
        answers = [_read(path) for path in paths]
    failures = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if failures:
        raise EngineError(f"the engine could not {loader.rsplit('.', 1)[1]}: {'; '.join(failures)}")
    return [answer["answer"] for answer in answers]


def _as_bytes(order: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except FileNotFoundError:
        return {"error": "it gave no answer"}
