"""The doctor on fake packages: right versions, absent, broken, crashing, and the wrong package of the right name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config.schema import LoggingConfig
from rlmegatron.metrics.optional import MLFLOW, missing_packages
from rlmegatron.platform import doctor, installed
from rlmegatron.platform.doctor import Finding, TorchFacts

Install = Callable[..., Path]
CPU = TorchFacts(version="2.13.0+cpu", gloo=True)
GPU = TorchFacts(
    version="2.13.0", cuda="12.9", devices=(("H200", 141 * 2**30), ("H200", 141 * 2**30)), nccl="2.27", gloo=True
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install("name", code, version=..., parts=(...))` puts a package in front of all others."""
    site = tmp_path / "site"
    site.mkdir()
    # Not syspath_prepend, which on leaving would put back the path as `bare` cut it, and for good.
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def add(name: str, code: str = "", *, version: str | None = None, parts: tuple[str, ...] = ()) -> Path:
        package = site / name
        for directory in (package, *(package / part for part in parts)):
            directory.mkdir(parents=True)
            (directory / "__init__.py").write_text(code if directory == package else "")
        if version is not None:
            metadata = site / f"{name}-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()
        return package

    return add


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the standard library and the fakes can be found, whatever PYTHONPATH brings."""
    brought = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [entry for entry in sys.path if "site-packages" not in entry and entry not in brought]
    monkeypatch.setattr(sys, "path", kept)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def fake_torch(*, cuda: str = "None", devices: int = 0) -> str:
    return (
        "import sys, types\n"
        "__version__ = '9.1'\n"
        f"version = types.SimpleNamespace(cuda={cuda})\n"
        "device = types.SimpleNamespace(name='H200', total_memory=2**30)\n"
        f"cuda = types.SimpleNamespace(is_available=lambda: {devices} > 0, device_count=lambda: {devices},\n"
        "    get_device_properties=lambda index: device, nccl=types.SimpleNamespace(version=lambda: (2, 27, 3)))\n"
        "distributed = types.ModuleType('torch.distributed')\n"
        "distributed.is_available = distributed.is_nccl_available = distributed.is_gloo_available = lambda: True\n"
        "sys.modules['torch.distributed'] = distributed\n"
        "print('a library that talks while it loads')\n"
    )


def test_torch_is_asked_in_a_child_and_its_chatter_is_ignored(install: Install) -> None:
    install("torch", fake_torch(cuda="'12.9'", devices=2))
    facts = doctor.torch_facts()
    assert facts == TorchFacts(
        version="9.1", cuda="12.9", devices=(("H200", 2**30), ("H200", 2**30)), nccl="2.27.3", gloo=True
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "ImportError: libcudart.so.12: cannot open",
        ),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_a_torch_that_does_not_import_is_shown_with_its_error_and_stops_runs(
    install: Install, code: str, error: str
) -> None:
    install("torch", code, version="9.1")
    finding = doctor.torch_finding(doctor.torch_facts())
    assert finding.status == "problem" and finding.stops_a_run
    assert finding.found.startswith(f"9.1 does not import ({error}")


@pytest.mark.usefixtures("bare")
def test_on_a_bare_machine_every_absence_is_reported_and_says_what_it_means() -> None:
    findings = {finding.name: finding for finding in doctor.examine()}
    stopping = {name for name, finding in findings.items() if finding.stops_a_run}
    assert stopping == {"PyTorch", "megatron-core", "SGLang", "transformers", "psutil"}
    absent = {name for name, finding in findings.items() if finding.status == "absent"}
    assert {"NCCL", "Transformer Engine", "NVIDIA Apex", "flash-attn", "SGLang kernels", "triton", "pyarrow"} <= absent
    assert {"tensorboard", "wandb", "mlflow"} <= absent
    assert all(finding.meaning for finding in findings.values() if finding.status != "ok")


@pytest.mark.parametrize(
    ("version", "stops"), [("0.15.3", True), ("0.16.1", False), ("0.19.2", False), ("0.20.0", True), ("1.0", True)]
)
def test_megatron_core_is_supported_from_0_16_to_0_19(install: Install, version: str, stops: bool) -> None:
    package = install("megatron")
    (package / "core").mkdir()
    (package / "core" / "__init__.py").write_text(f"__version__ = '{version}'")
    finding = doctor.megatron_finding()
    assert finding.stops_a_run is stops
    assert finding.found.startswith(version)


def test_a_megatron_core_that_does_not_import_shows_the_error(install: Install) -> None:
    install("megatron", "import nothing_of_this_name")
    finding = doctor.megatron_finding()
    assert finding.stops_a_run and "No module named 'nothing_of_this_name'" in finding.found


def test_the_unrelated_package_called_apex_is_recognised_without_importing_it(install: Install) -> None:
    package = install("apex", "raise SystemExit('imported')", version="0.9.10.dev0", parts=("models", "views"))
    finding = doctor.apex_finding()
    assert finding.status == "problem" and not finding.stops_a_run
    assert finding.found == f"the 'apex' 0.9.10.dev0 in {package} is an unrelated package (a Pyramid toolkit on PyPI)"
    assert finding.meaning.endswith("pip uninstall apex")


def test_nvidias_apex_is_ok_with_its_extensions_and_absent_without(install: Install) -> None:
    install("apex", version="0.1", parts=("normalization", "optimizers", "multi_tensor_apply"))
    assert doctor.apex_finding().status == "absent"
    assert "amp_C" in doctor.apex_finding().found
    install("torch")
    install("amp_C")
    assert doctor.apex_finding() == Finding("NVIDIA Apex", "ok", "0.1")


def test_an_extension_built_for_another_torch_is_a_problem(install: Install) -> None:
    install("flash_attn", "raise ImportError('undefined symbol: _ZN3c10')", version="2.8.3")
    finding = doctor.flash_attention_finding()
    assert finding.status == "problem" and finding.stops_a_run
    assert finding.found == "2.8.3 does not import (ImportError: undefined symbol: _ZN3c10)"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("distribution", ["mlflow-skinny", "mlflow"])
def test_the_package_of_a_sink_may_come_from_either_distribution(
    install: Install, tmp_path: Path, distribution: str
) -> None:
    """The check of a config says the same: it, too, asks for the module."""
    wanted = LoggingConfig(tensorboard=False, mlflow_uri="u")
    assert doctor.sink_finding(MLFLOW, without="w") == Finding("mlflow", "absent", "not installed", "w")
    assert len(missing_packages(wanted)) == 1
    install("mlflow")
    assert doctor.sink_finding(MLFLOW, without="w") == Finding("mlflow", "ok", "unknown version")
    metadata = tmp_path / "site" / f"{distribution.replace('-', '_')}-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.1\n")
    assert doctor.sink_finding(MLFLOW, without="w") == Finding("mlflow", "ok", "3.1")
    assert missing_packages(wanted) == []


@pytest.mark.parametrize(
    ("version", "stops"), [("0.5.20", True), ("0.5.21", False), ("0.5.21.post1", False), ("0.6.0", False)]
)
def test_sglang_older_than_its_weight_update_protocol_stops_runs(install: Install, version: str, stops: bool) -> None:
    install("sglang", version=version)
    assert doctor.sglang_finding().stops_a_run is stops


def test_kernels_are_missed_only_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    monkeypatch.setattr(doctor, "directory_of", lambda module: None)
    assert doctor.sgl_kernel_finding(has_device=False).status == "absent"
    assert doctor.sgl_kernel_finding(has_device=True).stops_a_run


def test_kernels_are_real_only_with_a_compiled_file(install: Install) -> None:
    package = install("sgl_kernel", version="0.4")
    assert doctor.sgl_kernel_finding(has_device=True).stops_a_run
    (package / "common_ops.abi3.so").touch()
    assert doctor.sgl_kernel_finding(has_device=True).status == "ok"


def test_our_own_stand_in_is_not_taken_for_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Path(doctor.__file__).parent / "sglang_site" / "kernels" / "sgl_kernel"
    assert stand_in.is_dir()
    monkeypatch.setattr(doctor, "directory_of", lambda module: stand_in)
    assert doctor.sgl_kernel_finding(has_device=False).status == "absent"


@pytest.mark.parametrize(
    ("facts", "driver", "status", "found"),
    [
        (CPU, None, "absent", "no NVIDIA driver"),
        (CPU, "580.1", "problem", "driver 580.1, but PyTorch is not a CUDA build"),
        (GPU, "580.1", "ok", "2 x H200 (141 GiB), driver 580.1"),
        (TorchFacts(cuda="12.9"), "470.2", "problem", "driver 470.2, but PyTorch for CUDA 12.9 finds no device"),
    ],
)
def test_devices_are_told_from_what_the_system_and_torch_have(
    facts: TorchFacts, driver: str | None, status: str, found: str
) -> None:
    finding = doctor.cuda_finding(facts, driver=driver)
    assert (finding.status, finding.found, finding.stops_a_run) == (status, found, False)


def test_a_gpu_without_nccl_stops_runs_and_a_cpu_does_not() -> None:
    assert doctor.nccl_finding(CPU).status == "absent"
    assert doctor.nccl_finding(GPU).status == "ok"
    assert doctor.nccl_finding(TorchFacts(devices=GPU.devices)).stops_a_run


def test_triton_is_needed_by_newer_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"megatron-core": "0.16.1"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    assert doctor.triton_finding().status == "absent"
    versions["megatron-core"] = "0.17.0"
    assert doctor.triton_finding().stops_a_run


def test_an_old_python_stops_runs() -> None:
    assert doctor.python_finding((3, 10, 4)).stops_a_run
    assert doctor.python_finding((3, 13, 0)).status == "ok"


def test_the_compiler_is_the_one_of_cxx_or_a_usual_name(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert doctor.compiler_finding({"PATH": str(tmp_path)}).found == str(compiler)
    assert doctor.compiler_finding({"PATH": str(tmp_path), "CXX": "nope++"}).found == "none of nope++"


def test_the_driver_version_is_read_from_the_kernels_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "version")
    assert doctor.nvidia_driver() == "580.95.05"
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "absent")
    assert doctor.nvidia_driver() is None


def test_the_exit_code_is_1_only_when_something_stops_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = [
        Finding("a", "ok", "1"),
        Finding("b", "absent", "not installed", "slow"),
        Finding("c", "problem", "x", "y"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: harmless)
    text, code = doctor.doctor()
    assert code == 0 and text.endswith("runs can start on this machine")
    monkeypatch.setattr(doctor, "examine", lambda: [*harmless, Finding("d", "problem", "x", "y", stops_a_run=True)])
    text, code = doctor.doctor()
    assert code == 1 and text.endswith("no run can start: see d")
    assert text.splitlines()[1] == "absent   b  not installed: slow"


def test_a_child_that_hangs_is_given_up() -> None:
    attempt = installed.try_in_child("import time; time.sleep(60)", timeout_s=0.5)
    assert attempt.error == "no answer within 0.5 s"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("0.17rc1", (0, 17)), ("0.5.21.post1", (0, 5, 21)), ("unknown", ())],
)
def test_versions_are_read_up_to_their_first_letter(version: str, numbers: tuple[int, ...]) -> None:
    assert installed.numbers_in(version) == numbers
