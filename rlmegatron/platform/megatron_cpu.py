"""What Megatron-Core needs to run where there is no CUDA device: a `torch` of its own that answers CUDA for the CPU.

In: nothing but what the installed torch and megatron-core lack. Out: megatron's modules see the stand-in under the name
`torch`; everybody else keeps the real one. With a CUDA device nothing is touched. Must never change a number.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from rlmegatron.platform import gloo_collectives

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "as_tensor", "eye")


def prepare_megatron() -> None:
    """Make megatron-core importable and usable on this machine; call before using megatron, as often as you like."""
    if torch.cuda.is_available():
        return
    # torch.compile would call a C++ compiler for every small fused function of a model that is tiny here anyway.
    torch.compiler.set_stance("force_eager")
    _answer_on_tensors()
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            _hand_stand_in(module)
    _import_megatron()
    _adjust_megatron()


class _AfterImport:
    """A finder that lets the usual ones find a megatron module and hands it the stand-in once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _hand_stand_in(module)


def _hand_stand_in(module: ModuleType) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = _stand_in()  # type: ignore[attr-defined]


def _import_megatron() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of every absent GPU package, which the doctor explains better
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.tensor_parallel.random
        import megatron.core.transformer.moe.moe_utils
        import megatron.core.transformer.multi_latent_attention  # noqa: F401


def _adjust_megatron() -> None:
    modules: Any = sys.modules
    random = modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    moe_utils = modules["megatron.core.transformer.moe.moe_utils"]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    mla = modules["megatron.core.transformer.multi_latent_attention"]
    if not isinstance(getattr(mla, "TELinear", None), type):
        mla.HAVE_TE = False
    if mla.Linear is None:  # it needs no Transformer Engine, but from 0.17 on it is imported only beside it
        mla.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear


class _StandIn(ModuleType):
    """A module that answers with `overrides` first and with `original` otherwise."""

    def __init__(self, original: Any, overrides: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(overrides)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@functools.cache
def _stand_in() -> _StandIn:
    factories = {name: _on_the_cpu(getattr(torch, name)) for name in _FACTORIES}
    collectives = ("all_to_all_single", "all_gather", "reduce_scatter")
    distributed = _StandIn(torch.distributed, {name: getattr(gloo_collectives, name) for name in collectives})
    return _StandIn(torch, {**factories, "cuda": _cuda(), "distributed": distributed})


def _cuda() -> _StandIn:
    cpu = torch.device("cpu")
    inert: dict[str, Any] = dict.fromkeys(("synchronize", "empty_cache", "set_device"), _nothing)
    inert |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_, **__: 0)
    inert |= dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), _Inert)
    return _StandIn(
        torch.cuda,
        inert
        | {
            "current_device": lambda: cpu,
            "is_current_stream_capturing": lambda: False,
            "stream": _no_stream,
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        },
    )


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _answer_on_tensors() -> None:
    """`.cuda()` stays where it is; `.type()` uses the spelling by which Megatron's optimizer sorts parameters."""
    tensor: Any = torch.Tensor
    if getattr(tensor.type, "answers_for_the_cpu", False):
        return
    original = tensor.type

    @functools.wraps(original)
    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    type_of.answers_for_the_cpu = True  # type: ignore[attr-defined]
    tensor.type = type_of
    tensor.cuda = lambda self, *_, **__: self


class _Inert:
    """A stream or event where nothing is asynchronous."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> _Inert:
        """An event that has happened."""
        return _Inert()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def _no_stream(*_: Any, **__: Any) -> Iterator[None]:
    yield
