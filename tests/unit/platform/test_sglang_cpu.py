"""What an engine on a CPU is given, and that nothing real is ever replaced by a stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmegatron.platform.sglang_cpu import (
    CPU_KV_TOKENS,
    KERNELS_DIR,
    STARTUP_DIR,
    EngineFindings,
    EngineSupport,
    engine_support,
    find_engine_needs,
    parse_cores,
)

ROOT = Path(__file__).parents[3]


def support(**found: bool) -> EngineSupport:
    findings = EngineFindings(**{"cuda": False, "sgl_kernel": False, "torchvision": True, **found})
    return engine_support(findings, cores=("0-1", "4"), context_length=100, max_running_requests=8)


def run_python(program: str, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_machine_with_cuda_is_given_nothing() -> None:
    assert support(cuda=True) == EngineSupport()


def test_stand_ins_are_used_only_for_what_is_missing() -> None:
    assert support().python_path == (str(STARTUP_DIR), str(KERNELS_DIR))
    assert support(sgl_kernel=True).python_path == (str(STARTUP_DIR),)
    assert support(sgl_kernel=True, torchvision=False).python_path == ()


def test_cores_and_threads_are_those_of_the_ranks() -> None:
    environment = support().environment
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0-1|4"
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("context_length", "running", "expected"),
    [(100, 8, 800), (4096, 256, CPU_KV_TOKENS), (200_000, 256, 200_000)],
)
def test_the_cache_holds_what_the_requests_can_need_up_to_a_bound(
    context_length: int, running: int, expected: int
) -> None:
    findings = EngineFindings(cuda=False, sgl_kernel=False, torchvision=True)
    args = engine_support(findings, cores=("0",), context_length=context_length, max_running_requests=running)
    assert args.server_args["max_total_tokens"] == expected


def test_the_stand_in_does_not_count_as_installed_kernels() -> None:
    program = "from rlmegatron.platform.sglang_cpu import find_engine_needs; print(find_engine_needs().sgl_kernel)"
    assert run_python(program, KERNELS_DIR) == str(find_engine_needs().sgl_kernel)


def test_kernels_that_are_installed_are_found(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("")
    program = "from rlmegatron.platform.sglang_cpu import find_engine_needs; print(find_engine_needs().sgl_kernel)"
    assert run_python(program, tmp_path) == "True"


def test_a_stand_in_operator_raises_and_names_itself() -> None:
    program = (
        "from sgl_kernel import fused_experts_cpu\n"
        "try:\n    fused_experts_cpu(1)\n"
        "except NotImplementedError as error:\n    print(error)\n"
    )
    assert run_python(program, KERNELS_DIR).startswith("sgl_kernel.fused_experts_cpu was called")


def test_torchvision_can_be_imported_in_an_engine_process() -> None:
    assert run_python("import torchvision; print('imported')", STARTUP_DIR) == "imported"


def test_the_sitecustomize_that_ours_stands_in_front_of_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_customized = True\n")
    assert run_python("import sys; print(sys.was_customized)", STARTUP_DIR, tmp_path) == "True"


def test_the_startup_file_does_not_import_torch() -> None:
    assert run_python("import sys; print('torch' in sys.modules)", STARTUP_DIR) == "False"


@pytest.mark.parametrize(("text", "expected"), [("3", (3,)), ("0-2,8", (0, 1, 2, 8))])
def test_core_lists_are_read(text: str, expected: tuple[int, ...]) -> None:
    assert parse_cores(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "0,,1"])
def test_what_is_not_a_core_list_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of cores"):
        parse_cores(text)
