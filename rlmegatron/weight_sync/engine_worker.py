"""What runs inside an engine's worker processes: it describes, fills and reads back the live parameters.

In: SGLang's model and an order. Out: an answer in the file that the order names. Named to SGLang as custom weight
loaders, which is how a call reaches every worker. Must never raise: that would end the engine, where an answer says
what is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from rlmegatron.weight_sync.digest import digest
from rlmegatron.weight_sync.engine_pull import Connection

_HERE = "rlmegatron.weight_sync.engine_worker"
DESCRIBE, CONNECT, PULL, DIGEST = (f"{_HERE}.{name}" for name in ("describe", "connect", "pull", "report_digests"))
LOADERS = (DESCRIBE, CONNECT, PULL, DIGEST)
ORDER = "order"

_connections: WeakKeyDictionary[Any, Connection] = WeakKeyDictionary()

NamedTensors = Iterable[tuple[str, Tensor]]


def describe(model: Any, named_tensors: NamedTensors) -> None:
    """Answers {"pid": of this process, "parameters": name -> [shape, dtype]}."""

    def act(_order: Any, _tensors: Any) -> dict[str, Any]:
        parameters = {}
        for name, parameter in model.named_parameters():
            if not parameter.is_contiguous():
                raise ValueError(f"the engine's {name} of shape {list(parameter.shape)} is not contiguous")
            parameters[name] = [list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]
        return {"pid": os.getpid(), "parameters": parameters}

    _answer(named_tensors, act)


def connect(model: Any, named_tensors: NamedTensors) -> None:
    """Keep the tables of all later pulls, and set to zero what no pull writes (`Connection`)."""

    def act(order: Any, tensors: Any) -> None:
        _connections.pop(model, None)
        connection = Connection(order, tensors, dict(model.named_parameters()))
        _connections[model] = connection

    _answer(named_tensors, act)


def pull(model: Any, named_tensors: NamedTensors) -> None:
    """Fill every parameter, then have SGLang derive what it keeps besides them."""

    def act(order: Any, _tensors: Any) -> None:
        if model not in _connections:
            raise ValueError("this worker was never told where the weights come from")
        _connections[model].pull(order, dict(model.named_parameters()))
        # What `load_weights` of some models does at its end, such as splitting keys and values of latent attention.
        getattr(model, "post_load_weights", lambda: None)()

    _answer(named_tensors, act)


def report_digests(model: Any, named_tensors: NamedTensors) -> None:
    """Answers with one entry per box: its digest in the first home that exists, or a sentence that says what is
    missing.

    A box is [homes, row, column, width]: each home [parameter, box], then its place in the canonical tensor (`digest`).
    """

    def act(order: Any, _tensors: Any) -> list[int | str]:
        live = dict(model.named_parameters())
        return [_of_first(model, live, *box) for box in order["boxes"]]

    _answer(named_tensors, act)


def _answer(named_tensors: NamedTensors, act: Callable[[Any, Mapping[str, Tensor]], Any]) -> None:
    """The order is JSON in bytes. A file answers, because SGLang moves the tensors of a call to the engine's device:
    nothing written into one would come back from there."""
    tensors = dict(named_tensors)
    order = json.loads(tensors.pop(ORDER).cpu().numpy().tobytes())
    try:
        found = {"answer": act(order, tensors)}
    except (ValueError, OSError) as error:
        found = {"error": str(error)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    path = Path(order["path"])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.rename(path)


def _of_first(
    model: Any, live: Mapping[str, Tensor], homes: Sequence[tuple[str, Any]], row: int, column: int, width: int
) -> int | str:
    for name, box in homes:
        parameter = live[name] if name in live else _derived(model, name)
        if parameter is None:
            continue
        if parameter.dim() != len(box) or any(
            stop > size for (_, stop), size in zip(box, parameter.shape, strict=True)
        ):
            return f"{name} of shape {list(parameter.shape)} has no box {box}"
        found = parameter[tuple(slice(start, stop) for start, stop in box)]
        return digest(found, row=row, column=column, width=width)
    return f"there is no {' and no '.join(name for name, _ in homes)}"


def _derived(model: Any, path: str) -> Tensor | None:
    """A tensor that is no parameter, by its path of attributes."""
    found = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Tensor) else None
