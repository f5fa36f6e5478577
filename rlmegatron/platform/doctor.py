"""`python -m rlmegatron doctor`: what a run needs or would like, what of it is here, and what an absence means.

In: this machine. Out: one `Finding` per item, and their text. Must never import what it examines into this process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlmegatron.metrics.optional import MLFLOW, TENSORBOARD, WANDB, Package
from rlmegatron.platform.installed import directory_of, numbers_in, try_in_child, version_of

OLDEST_PYTHON = (3, 11)
MEGATRON_RANGE = ((0, 16), (0, 19))
OLDEST_SGLANG = (0, 5, 21)
_MEGATRON_THAT_IMPORTS_TRITON = (0, 17)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_STAND_INS = Path(__file__).parent / "sglang_site"

_TORCH_FACTS = """
import json, torch, torch.distributed as dist
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": [], "nccl": None, "gloo": False}
if dist.is_available():
    facts["gloo"] = dist.is_gloo_available()
    if dist.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts["devices"].append([device.name, device.total_memory])
print("FACTS" + json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One item: what was found and, unless all is well, what that means to the user."""

    name: str
    status: Literal["ok", "absent", "problem"]
    found: str
    meaning: str = ""
    stops_a_run: bool = False


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What torch says of itself, in a child; `error` holds why it could not."""

    version: str | None = None
    cuda: str | None = None
    devices: tuple[tuple[str, int], ...] = ()
    nccl: str | None = None
    gloo: bool = False
    error: str | None = None


def doctor() -> tuple[str, int]:
    """The report and the exit code: 1 if something stops every run, else 0."""
    findings = examine()
    return report(findings), int(any(finding.stops_a_run for finding in findings))


def examine() -> list[Finding]:
    """Look at everything; takes a few seconds, for torch and megatron-core are really imported (in children)."""
    torch = torch_facts()
    driver = nvidia_driver()
    return [
        python_finding(sys.version_info[:3]),
        torch_finding(torch),
        cuda_finding(torch, driver=driver),
        nccl_finding(torch),
        megatron_finding(),
        transformer_engine_finding(),
        apex_finding(),
        flash_attention_finding(),
        sglang_finding(),
        sgl_kernel_finding(has_device=bool(torch.devices)),
        triton_finding(),
        _needed("transformers", "tokenizers and model configs are read with it"),
        _needed("psutil", "checkpoints are written with it"),
        _optional("pyarrow", "data files must be JSONL: Parquet files cannot be read"),
        sink_finding(TENSORBOARD, without=f"runs need {TENSORBOARD.setting}: false"),
        *(sink_finding(one, without=f"optional: {one.setting} needs it; {one.install}") for one in (WANDB, MLFLOW)),
        compiler_finding(os.environ),
    ]


def report(findings: Sequence[Finding]) -> str:
    """One line per finding, and a last line that says whether runs can start."""
    marks = {"ok": "ok     ", "absent": "absent ", "problem": "PROBLEM"}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        meaning = f": {finding.meaning}" if finding.meaning else ""
        lines.append(f"{marks[finding.status]}  {finding.name.ljust(width)}  {finding.found}{meaning}")
    stopping = [finding.name for finding in findings if finding.stops_a_run]
    lines.append(f"\nno run can start: see {', '.join(stopping)}" if stopping else "\nruns can start on this machine")
    return "\n".join(lines)


def torch_facts() -> TorchFacts:
    """Import torch in a child and ask it."""
    if directory_of("torch") is None:
        return TorchFacts(error="not installed")
    attempt = try_in_child(_TORCH_FACTS)
    if attempt.error is not None:
        return TorchFacts(version=version_of("torch"), error=attempt.error)
    facts: dict[str, Any] = json.loads(attempt.output.rpartition("FACTS")[2])
    devices = tuple((str(name), int(memory)) for name, memory in facts.pop("devices"))
    return TorchFacts(**facts, devices=devices)


def nvidia_driver() -> str | None:
    """The version of the NVIDIA kernel driver; None where there is none."""
    try:
        words = _DRIVER_FILE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown version")


def python_finding(version: tuple[int, ...]) -> Finding:
    """The interpreter that runs this."""
    found = f"{'.'.join(map(str, version))} ({platform.machine()})"
    if version < OLDEST_PYTHON:
        return _stopping("Python", found, f"use {'.'.join(map(str, OLDEST_PYTHON))} or newer")
    return Finding("Python", "ok", found)


def torch_finding(facts: TorchFacts) -> Finding:
    """PyTorch itself, and for what it was built."""
    if facts.error is not None:
        found = facts.error if facts.version is None else f"{facts.version} does not import ({facts.error})"
        return _stopping("PyTorch", found, "nothing runs without it; launch/quickstart.sh installs it")
    build = f"built for CUDA {facts.cuda}" if facts.cuda else "a CPU build"
    if not facts.gloo:
        return _stopping(
            "PyTorch", f"{facts.version}, {build}, without gloo", "ranks agree over gloo; use another build"
        )
    return Finding("PyTorch", "ok", f"{facts.version}, {build}")


def cuda_finding(facts: TorchFacts, *, driver: str | None) -> Finding:
    """Devices that torch can use, beside what the system has."""
    name = "CUDA devices"
    if facts.devices:
        kinds = [f"{device} ({memory / 2**30:.0f} GiB)" for device, memory in facts.devices]
        counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        return Finding(name, "ok", f"{counted}, driver {driver or 'not visible'}")
    if driver is None:
        return Finding(name, "absent", "no NVIDIA driver", "models train and generate on the CPU, over gloo")
    if facts.cuda is None:
        return Finding(name, "problem", f"driver {driver}, but PyTorch is not a CUDA build", "runs would use the CPU")
    why = f"PyTorch for CUDA {facts.cuda} finds no device"
    return Finding(name, "problem", f"driver {driver}, but {why}", "runs would use the CPU; the driver may be too old")


def nccl_finding(facts: TorchFacts) -> Finding:
    """NCCL as torch carries it."""
    if facts.nccl is not None:
        return Finding("NCCL", "ok", facts.nccl)
    if facts.devices:
        return _stopping("NCCL", "not in this PyTorch", "GPUs communicate over it; use another build of PyTorch")
    return Finding("NCCL", "absent", "not in this PyTorch", "ranks communicate over gloo, as they do on a CPU anyway")


def megatron_finding() -> Finding:
    """megatron-core, whose range of versions is what the tests cover."""
    name, version = "megatron-core", version_of("megatron-core")
    oldest, newest = (".".join(map(str, end)) for end in MEGATRON_RANGE)
    if version is None:
        if directory_of("megatron") is None:
            return _stopping(name, "not installed", "the learner is built on it; launch/quickstart.sh installs it")
        version = "unknown"
    attempt = try_in_child("import megatron.core; print('VERSION' + megatron.core.__version__)")
    if attempt.error is not None:
        return _stopping(name, f"{version} does not import ({attempt.error})", "the learner is built on it")
    # What is imported decides, not the metadata: a copy in front of the path may be another version.
    version = attempt.output.rpartition("VERSION")[2].strip()
    if not MEGATRON_RANGE[0] <= numbers_in(version)[:2] <= MEGATRON_RANGE[1]:
        return _stopping(name, version, f"outside the supported range; use {oldest} to {newest}")
    return Finding(name, "ok", f"{version} (supported: {oldest} to {newest})")


def transformer_engine_finding() -> Finding:
    """Transformer Engine."""
    return _compiled(
        "Transformer Engine",
        module="transformer_engine",
        code="import transformer_engine.pytorch",
        distributions=("transformer-engine", "transformer_engine"),
        absent="Megatron-Core's local layers are used: right on any device, slower on GPUs, and no FP8",
    )


def apex_finding() -> Finding:
    """NVIDIA's Apex, or the package of the same name on PyPI that is something else."""
    name, directory = "NVIDIA Apex", directory_of("apex")
    if directory is None:
        meaning = "optional: Transformer Engine or PyTorch supply the fused optimizer and norms that it would"
        return Finding(name, "absent", "not installed", meaning)
    parts = [part for part in ("normalization", "optimizers", "multi_tensor_apply") if (directory / part).is_dir()]
    if not parts:
        found = (
            f"the 'apex' {version_of('apex') or ''} in {directory} is an unrelated package (a Pyramid toolkit on PyPI)"
        )
        meaning = "Megatron-Core only asks whether 'apex' imports and may take it for NVIDIA's; pip uninstall apex"
        return Finding(name, "problem", found, meaning)
    version = version_of("apex") or "installed"
    if directory_of("amp_C") is None:
        meaning = "its fused kernels cannot be used; build it from NVIDIA's source with --cpp_ext --cuda_ext"
        return Finding(name, "absent", f"{version} without its CUDA extensions (amp_C)", meaning)
    attempt = try_in_child("import torch, amp_C, apex.optimizers, apex.normalization")
    if attempt.error is not None:
        return Finding(name, "problem", f"{version} does not import ({attempt.error})", "rebuild it for this PyTorch")
    return Finding(name, "ok", version)


def flash_attention_finding() -> Finding:
    """flash-attn."""
    return _compiled(
        "flash-attn",
        module="flash_attn",
        code="import flash_attn",
        distributions=("flash-attn", "flash_attn"),
        absent="attention runs on PyTorch's or Transformer Engine's own kernels",
    )


def sglang_finding() -> Finding:
    """SGLang, whose own import needs what the engine's process sets up, so its metadata must do."""
    name, version = "SGLang", version_of("sglang")
    oldest = ".".join(map(str, OLDEST_SGLANG))
    if directory_of("sglang") is None or version is None:
        return _stopping(name, "not installed", "answers are generated with it; launch/quickstart.sh installs it")
    if version != "unknown" and numbers_in(version) < OLDEST_SGLANG:
        return _stopping(name, version, f"its weight updates differ from what is used here; use {oldest} or newer")
    return Finding(name, "ok", f"{version} (tested: {oldest})")


def sgl_kernel_finding(*, has_device: bool) -> Finding:
    """SGLang's compiled kernels; the stand-in that CPU engines get from us is not taken for them."""
    name, directory = "SGLang kernels", directory_of("sgl_kernel")
    if directory is not None and directory.resolve().is_relative_to(_STAND_INS.resolve()):
        directory = None
    if directory is not None:
        version = version_of("sglang-kernel") or version_of("sgl-kernel") or "installed"
        if not list(directory.rglob("*.so")):
            meaning = "reinstall it, or uninstall it on a machine without a GPU"
            return Finding(name, "problem", f"{directory} holds no compiled kernel", meaning, stops_a_run=has_device)
        return Finding(name, "ok", version)
    if has_device:
        return _stopping(name, "not installed", "SGLang needs them on a GPU; install the 'gpu' extra")
    return Finding(name, "absent", "not installed", "engines run SGLang's own PyTorch layers, as is right on a CPU")


def triton_finding() -> Finding:
    """triton, which newer versions of megatron-core import unconditionally."""
    version = version_of("triton")
    if version is not None:
        return Finding("triton", "ok", version)
    megatron = version_of("megatron-core")
    if megatron is not None and numbers_in(megatron)[:2] >= _MEGATRON_THAT_IMPORTS_TRITON:
        return _stopping("triton", "not installed", f"megatron-core {megatron} imports it; pip install triton")
    return Finding("triton", "absent", "not installed", "optional here; GPUs want it for fused kernels")


def compiler_finding(environment: Mapping[str, str]) -> Finding:
    """A C++ compiler, from CXX or the usual names."""
    candidates = [environment["CXX"]] if environment.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for name in candidates if (path := shutil.which(name, path=environment.get("PATH")))), None)
    if found is not None:
        return Finding("C++ compiler", "ok", found)
    tried = ", ".join(candidates)
    return Finding("C++ compiler", "absent", f"none of {tried}", "native extensions and torch.compile cannot be built")


def sink_finding(package: Package, *, without: str) -> Finding:
    """What a sink imports, found as the check of a config finds it, from whichever distribution it came."""
    if not package.is_installed:
        return Finding(package.module, "absent", "not installed", without)
    return Finding(package.module, "ok", _first_version(package.distributions))


def _needed(distribution: str, why: str) -> Finding:
    version = version_of(distribution)
    if version is None or directory_of(distribution) is None:
        return _stopping(distribution, "not installed", f"{why}; pip install {distribution}")
    return Finding(distribution, "ok", version)


def _optional(distribution: str, without: str) -> Finding:
    version = version_of(distribution)
    if version is None or directory_of(distribution) is None:
        return Finding(distribution, "absent", "not installed", without)
    return Finding(distribution, "ok", version)


def _compiled(name: str, *, module: str, code: str, distributions: Sequence[str], absent: str) -> Finding:
    """An optional package with compiled parts, which commonly break when torch changes below them."""
    if directory_of(module) is None:
        return Finding(name, "absent", "not installed", absent)
    version = _first_version(distributions)
    attempt = try_in_child(code)
    if attempt.error is not None:
        meaning = "reinstall it for this PyTorch, or uninstall it"
        return Finding(name, "problem", f"{version} does not import ({attempt.error})", meaning, stops_a_run=True)
    return Finding(name, "ok", version)


def _first_version(distributions: Sequence[str]) -> str:
    return next((found for one in distributions if (found := version_of(one))), "unknown version")


def _stopping(name: str, found: str, meaning: str) -> Finding:
    return Finding(name, "problem", found, meaning, stops_a_run=True)
