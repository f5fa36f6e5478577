"""The examples in docstrings, whose numbers were worked out by hand, give those numbers."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "rlmegatron").rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


def test_the_algorithms_have_examples() -> None:
    without = {"__init__", "table", "loss_term", "promised"}
    algorithms = {path.stem for path in (ROOT / "rlmegatron" / "algorithms").glob("*.py")} - without
    assert {f"rlmegatron.algorithms.{name}" for name in algorithms} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_are_right(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted and not results.failed
