"""Who may import whom, and how long a file or a function may be; each breach names its file.

In: the source of the repository, parsed, never imported. Out: failures. What it cannot see: imports made from strings.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from rlmegatron.config.load import load

ROOT = Path(__file__).parents[2]
PACKAGE = "rlmegatron"
LAYERS = {
    "types": 0,
    "config": 0,
    "algorithms": 1,
    "rewards": 1,
    "data": 1,
    "metrics": 1,
    "distributed": 2,
    "platform": 2,
    "learner": 3,
    "models": 3,
    "rollout": 3,
    "weight_sync": 4,
    "checkpoint": 4,
    "conversion": 4,
    "trainer": 5,
    "preflight": 5,
    "cli": 6,
    "__main__": 7,
}
# The learner builds its models from the architecture table, and so stands above it in the same layer.
ALLOWED_SIBLINGS = {("learner", "models")}
MEGATRON_PACKAGES = {"learner", "checkpoint", "conversion", "platform"}
PARALLEL_STATE_FILES = {"rlmegatron/learner/groups.py"}
SGLANG_PACKAGES = {"rollout"}
# The part of the weight update that runs inside the engine's own process.
SGLANG_FILES = {"rlmegatron/weight_sync/engine_worker.py"}
TORCH_FREE = {"types", "config", "rewards"}
WHOLE_CONFIG_PACKAGES = {"trainer", "preflight", "cli", "config"}
FORBIDDEN_NAMES = {"utils", "helpers", "misc", "common"}
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 80


def python_files(*folders: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


PACKAGE_FILES = python_files(PACKAGE)
ALL_FILES = [*PACKAGE_FILES, *python_files("tests", "tools", "launch")]


@cache
def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=file)


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported at any depth; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part_of(file: str) -> str:
    """The package (or module) of ours that a file belongs to; '' for rlmegatron/__init__.py."""
    name = Path(file).parts[1]
    return "" if name == "__init__.py" else name.removesuffix(".py")


def breaches(file: str, forbidden: set[str]) -> list[str]:
    """Imports in `file` of a module in `forbidden` or below one."""
    return [
        f"{file}:{line} imports {name}"
        for line, name in imports_of(parse(file))
        if any(name == module or name.startswith(f"{module}.") for module in forbidden)
    ]


def layer_breaches(file: str, tree: ast.AST) -> list[str]:
    """Imports of a package of ours that is not in a lower layer."""
    part = part_of(file)
    found = []
    for line, name in imports_of(tree):
        parts = name.split(".")
        if parts[0] != PACKAGE or parts[1] not in LAYERS or parts[1] == part:
            continue
        if LAYERS[parts[1]] < LAYERS[part] or (part, parts[1]) in ALLOWED_SIBLINGS:
            continue
        found.append(f"{file}:{line} (layer {LAYERS[part]}) imports {name} (layer {LAYERS[parts[1]]})")
    return found


def test_the_search_for_imports_finds_those_that_are_known_to_be_there() -> None:
    assert breaches("rlmegatron/platform/megatron_cpu.py", {"megatron"})
    assert breaches("rlmegatron/platform/megatron_cpu.py", {"torch"})
    assert breaches("rlmegatron/preflight.py", {"rlmegatron.config.schema.RunConfig"})
    assert breaches("rlmegatron/preflight.py", {"rlmegatron.con"}) == []


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part_of(file) for file in PACKAGE_FILES} - {""}
    assert parts <= set(LAYERS), f"no layer for {sorted(parts - set(LAYERS))}; see the design's section on layout"


def test_the_layer_check_sees_what_it_should() -> None:
    bad = ast.parse("def f():\n    from rlmegatron.trainer.main import main\nimport rlmegatron.rewards.table\n")
    good = ast.parse("import json\nfrom rlmegatron import __version__\nfrom rlmegatron.types import Sample\n")
    assert layer_breaches("rlmegatron/data/x.py", good) == []
    assert layer_breaches("rlmegatron/data/x.py", bad) == [
        "rlmegatron/data/x.py:3 (layer 1) imports rlmegatron.rewards.table (layer 1)",
        "rlmegatron/data/x.py:2 (layer 1) imports rlmegatron.trainer.main.main (layer 5)",
    ]


def all_breaches(files: Iterable[str], forbidden: set[str]) -> list[str]:
    return [breach for file in files for breach in breaches(file, forbidden)]


def test_imports_come_from_a_lower_layer() -> None:
    assert list(imports_of(parse(f"{PACKAGE}/__init__.py"))) == [], "importing rlmegatron itself loads nothing"
    inner = [file for file in PACKAGE_FILES if part_of(file)]
    assert [breach for file in inner for breach in layer_breaches(file, parse(file))] == []


def test_megatron_is_imported_only_where_models_live() -> None:
    elsewhere = [file for file in PACKAGE_FILES if part_of(file) not in MEGATRON_PACKAGES]
    assert all_breaches(elsewhere, {"megatron"}) == []


def names_parallel_state(file: str) -> bool:
    tree = parse(file)
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {part for _, name in imports_of(tree) for part in name.split(".")}
    return bool(named & {"parallel_state", "mpu"})


def test_parallel_state_is_named_in_one_file_only() -> None:
    """Everybody else is passed process groups."""
    assert {file for file in PACKAGE_FILES if names_parallel_state(file)} == PARALLEL_STATE_FILES


def test_sglang_is_imported_only_by_the_rollout() -> None:
    elsewhere = [file for file in PACKAGE_FILES if part_of(file) not in SGLANG_PACKAGES and file not in SGLANG_FILES]
    assert all_breaches(elsewhere, {"sglang", "sgl_kernel"}) == []


def test_records_config_and_rewards_need_no_torch() -> None:
    torch_free = [file for file in PACKAGE_FILES if part_of(file) in TORCH_FREE]
    assert all_breaches(torch_free, {"torch", "transformers", "megatron", "sglang"}) == []


def test_only_trainer_and_command_line_see_the_whole_config() -> None:
    elsewhere = [file for file in PACKAGE_FILES if part_of(file) not in WHOLE_CONFIG_PACKAGES]
    assert all_breaches(elsewhere, {"rlmegatron.config.schema.RunConfig", "rlmegatron.config.load"}) == []


def test_algorithms_are_pure_functions_of_tensors() -> None:
    algorithms = [file for file in PACKAGE_FILES if part_of(file) == "algorithms"]
    assert all_breaches(algorithms, {"torch.distributed", "rlmegatron.config", "yaml", "pathlib"}) == []


def test_files_are_short_and_named_for_what_they_hold() -> None:
    lengths = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in ALL_FILES}
    assert {file: length for file, length in lengths.items() if length > MOST_FILE_LINES} == {}, "split by idea"
    assert [file for file in ALL_FILES if Path(file).stem in FORBIDDEN_NAMES] == [], "name it for what it holds"


def test_functions_are_short() -> None:
    functions = (
        (file, node)
        for file in ALL_FILES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {
        f"{file}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for file, node in functions
    }
    assert {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES} == {}


def test_modules_open_with_what_they_own() -> None:
    named = [file for file in PACKAGE_FILES if Path(file).name != "__init__.py"]
    assert [file for file in named if not ast.get_docstring(parse(file))] == []


@pytest.mark.parametrize("module", ["rlmegatron", "rlmegatron.types", "rlmegatron.config.load", "rlmegatron.cli"])
def test_importing_what_reads_a_config_loads_nothing_heavy(module: str) -> None:
    heavy = ("torch", "transformers", "megatron", "sglang", "numpy")
    code = f"import sys, {module}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("file", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "yaml_configs").glob("*.y*ml")))
def test_every_config_that_is_shipped_parses_and_is_short(file: str) -> None:
    load(ROOT / file)
    assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) <= 60
