"""What tests do inside a stand-in engine's workers: each function is named to the engine as a custom weight loader.

In: SGLang's model, or its stand-in, and one tensor with JSON in bytes. Out: another model, or a worker that will fail.
Workers import it: it must never import more than they have already.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlmegatron.weight_sync import engine_pull

NamedTensors = Iterable[tuple[str, Tensor]]


def as_tensor(order: Any) -> Tensor:
    """For one of the functions below."""
    return torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)


def set_parameters(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Name -> shape and type of parameters of zeros, as SGLang's are before they are loaded; None removes one."""
    for path, described in _order(named_tensors).items():
        *modules, name = path.split(".")
        owner = model
        for module in modules:
            if module not in owner._modules:
                owner.add_module(module, nn.Module())
            owner = owner.get_submodule(module)
        if described is None:
            delattr(owner, name)
        else:
            shape, dtype = described
            zeros = torch.zeros(shape, dtype=getattr(torch, dtype))
            owner.register_parameter(name, nn.Parameter(zeros, requires_grad=False))


def flip_last_bit(model: nn.Module, named_tensors: NamedTensors) -> None:
    """Of the first element of the named parameter, if one is named."""
    name = _order(named_tensors)
    if name is not None:
        model.get_parameter(name).detach().view(-1).view(torch.uint8)[0] ^= 1


def die_at(_model: nn.Module, named_tensors: NamedTensors) -> None:
    """[function of engine_pull, number]: the worker is killed when it begins that call from now on, counting from 1."""
    _before_call(_order(named_tensors), lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail_at(_model: nn.Module, named_tensors: NamedTensors) -> None:
    """The same, but the call raises, once."""

    def fail() -> None:
        raise RuntimeError("the worker went wrong")

    _before_call(_order(named_tensors), fail)


def _before_call(when: tuple[str, int] | None, act: Callable[[], None]) -> None:
    if when is None:
        return
    (name, wanted), number = when, 0
    function = getattr(engine_pull, name)

    def counted(*args: Any) -> Any:
        nonlocal number
        number += 1
        if number == wanted:
            act()
        return function(*args)

    setattr(engine_pull, name, counted)


def _order(named_tensors: NamedTensors) -> Any:
    ((_, tensor),) = named_tensors
    return json.loads(tensor.numpy().tobytes())
