"""What runs inside an engine's worker processes: it reads back the live parameters and digests them.

In: SGLang's model and an order. Out: a file with the digests. Named to SGLang as a custom weight loader, which is how a
call reaches every worker; it changes no weight. Must never raise for what an engine lacks: that would end the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlmegatron.weight_sync.digest import digest

REPORT = "rlmegatron.weight_sync.engine_worker.report_digests"
ORDER = "order"


def report_digests(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """`order` is JSON in bytes: where to write, and per box its possible homes, each [parameter, box].

    What is written is a JSON list: per box the digest in the first home that exists, or a sentence that says what is
    missing. A file, because SGLang moves the tensors of a call to the engine's device: nothing written into one would
    come back from there.
    """
    order = json.loads(dict(named_tensors)[ORDER].cpu().numpy().tobytes())
    live = dict(model.named_parameters())
    found = [_of_first(model, live, homes) for homes in order["boxes"]]
    Path(order["path"]).write_text(json.dumps(found), encoding="utf-8")


def _of_first(model: Any, live: Mapping[str, Tensor], homes: Sequence[tuple[str, Any]]) -> int | str:
    for name, box in homes:
        parameter = live[name] if name in live else _derived(model, name)
        if parameter is None:
            continue
        if parameter.dim() != len(box) or any(
            stop > size for (_, stop), size in zip(box, parameter.shape, strict=True)
        ):
            return f"{name} of shape {list(parameter.shape)} has no box {box}"
        return digest(parameter[tuple(slice(start, stop) for start, stop in box)])
    return f"there is no {' and no '.join(name for name, _ in homes)}"


def _derived(model: Any, path: str) -> Tensor | None:
    """A tensor that is no parameter, by its path of attributes."""
    found = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Tensor) else None
