"""The worker process of a stand-in engine's rank: it holds a model and treats payloads as SGLang's scheduler does.

In: orders from the engine's lead, over a socket. Out: answers, each a value or the traceback of what went wrong. It
ends with its lead, at once, whatever it is doing. Must never import sglang, megatron or torch.distributed.
"""

from __future__ import annotations

import base64
import copy
import importlib
import os
import pickle
import select
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from bench.stand_in_model import ModelSpec, StandInModel

ENDED_WITH_LEAD = 3


class Worker:
    """One rank; its public methods are the orders."""

    def __init__(self) -> None:
        self._model: StandInModel | None = None
        self._shown: dict[str, StandInModel] = {}
        self._has_loaded = False

    def build(self, spec: ModelSpec, num_threads: int) -> None:
        """Make the model; another one is forgotten."""
        torch.set_num_threads(num_threads)
        self._model = None
        self._shown.clear()
        self._model = StandInModel(spec)

    def begin(self) -> None:
        """Open a weight update."""
        self._has_loaded = False

    def load(self, payload: str, load_format: str | None, caller: str) -> None:
        """SGLang's WeightUpdater.update_weights_from_tensor, with the payload of this rank.

        Loaders keep things by model, so each caller is shown an object of its own, with the same parameters.
        """
        model = self._shown.setdefault(caller, copy.copy(self._built()))
        device = next(model.parameters()).device
        named_tensors = [(name, tensor.to(device)) for name, tensor in pickle.loads(base64.b64decode(payload))]
        if load_format is None:
            model.load_weights(named_tensors)
        else:
            module, function = load_format.rsplit(".", 1)
            getattr(importlib.import_module(module), function)(model, named_tensors)
        self._has_loaded = True

    def end(self) -> None:
        """Close it: SGLang derives what it derives only where nothing was loaded, since its loaders have done that."""
        if not self._has_loaded:
            self._built().post_load_weights()

    def spoil(self) -> None:
        """See `StandInModel`."""
        self._built().spoil()

    def names(self) -> list[str]:
        """Of the parameters."""
        return [name for name, _ in self._built().named_parameters()]

    def describe(self, path: str) -> tuple[list[int], torch.dtype]:
        """Shape and type of one tensor."""
        tensor = self._built().held(path)
        return list(tensor.shape), tensor.dtype

    def content(self, path: str) -> memoryview:
        """The bytes of one tensor, which follow the answer as they are."""
        tensor = self._built().held(path).detach().contiguous().cpu()
        return memoryview(tensor.flatten().view(torch.uint8).numpy().data)

    def _built(self) -> StandInModel:
        assert self._model is not None, "the worker was given no model"
        return self._model


def run_worker(connection: Connection) -> None:
    """Say who this is, then obey until the lead hangs up."""
    threading.Thread(target=_end_with_lead, args=(connection.fileno(),), daemon=True).start()
    worker = Worker()
    connection.send(os.getpid())
    while True:
        try:
            order, arguments = connection.recv()
        except EOFError:
            return
        succeeded, value = _attempt(getattr(worker, order), arguments)
        if isinstance(value, memoryview):
            connection.send((True, None))
            connection.send_bytes(value)
        else:
            connection.send((succeeded, value))


def _attempt(work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, work(*arguments)
    except Exception:
        return False, traceback.format_exc()


def _end_with_lead(descriptor: int) -> None:
    """Waits for nothing but the end of the connection: the main thread may be held up in a loader, for ever."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    sys.stdout.flush()
    os._exit(ENDED_WITH_LEAD)
