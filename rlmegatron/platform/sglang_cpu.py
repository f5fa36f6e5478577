"""What an SGLang engine needs on a machine without CUDA: environment variables, search path and server arguments.

In: what is found on this machine. Out: `EngineSupport`, empty where there is a CUDA device. Must never import sglang,
and never put a stand-in where the real thing is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STAND_INS = Path(__file__).parent / "sglang_site"
STARTUP_DIR = STAND_INS / "startup"
KERNELS_DIR = STAND_INS / "kernels"
CPU_KV_TOKENS = 131072


@dataclass(frozen=True, slots=True)
class EngineFindings:
    """What decides how an engine is started here."""

    cuda: bool
    """Whether a CUDA (or ROCm) device is usable."""
    sgl_kernel: bool
    """Whether SGLang's compiled kernels are installed."""
    torchvision: bool
    """Whether torchvision, which SGLang imports, is installed."""


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """What to add to an engine's process."""

    environment: dict[str, str] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()
    """Directories to put in front of PYTHONPATH."""
    server_args: dict[str, str | int | float | bool] = field(default_factory=dict)
    """SGLang server arguments, by their Python names."""


def find_engine_needs() -> EngineFindings:
    """Look at this machine without importing SGLang, its kernels or torchvision."""
    import torch

    return EngineFindings(
        cuda=torch.cuda.is_available(),
        sgl_kernel=_is_really_installed("sgl_kernel"),
        torchvision=importlib.util.find_spec("torchvision") is not None,
    )


def engine_support(
    found: EngineFindings, *, cores: Sequence[str], context_length: int, max_running_requests: int
) -> EngineSupport:
    """Settings with which SGLang serves on a CPU, or nothing on a machine with CUDA.

    cores: core lists such as "0-3,8", one per rank of the engine, which its threads are bound to. The KV cache holds
    what `max_running_requests` of `context_length` tokens can need, up to CPU_KV_TOKENS; beyond that requests wait.
    """
    if found.cuda:
        return EngineSupport()
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores),
        "OMP_NUM_THREADS": str(max(1, min(num_cores(entry) for entry in cores))),
        # Engines and learners share cores: a thread that spins at a barrier keeps the one it waits for from running,
        # which costs a factor of 10 and more as soon as anything else runs.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Compiling the few decorated functions takes longer than a test run and gains nothing on small models.
        "TORCH_COMPILE_DISABLE": "1",
    }
    python_path = [str(STARTUP_DIR)] if found.torchvision else []
    if not found.sgl_kernel:
        python_path.append(str(KERNELS_DIR))
    server_args: dict[str, str | int | float | bool] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "max_total_tokens": max(context_length, min(max_running_requests * context_length, CPU_KV_TOKENS)),
        # Only bounds max_total_tokens: host memory is shared with the learner, so free memory says little here.
        "mem_fraction_static": 0.95,
    }
    return EngineSupport(environment=environment, python_path=tuple(python_path), server_args=server_args)


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers of a list such as "0-3,8"; raises ValueError for anything else."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} is not a list of cores; write for example '0-3,8'")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def num_cores(text: str) -> int:
    """How many cores a list such as "0-3,8" names."""
    return len(parse_cores(text))


def _is_really_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return not Path(origin).resolve().is_relative_to(STAND_INS.resolve())
