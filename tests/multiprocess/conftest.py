"""Tiny models and what Hugging Face makes of them, once per session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks


def _write_models(directory: str) -> None:
    from tiny_models import write_models

    write_models(Path(directory))


def _references(directory: str) -> dict[str, Any]:
    from tiny_models import FAMILIES, hf_reference

    return {family: hf_reference(f"{directory}/{family}") for family in FAMILIES}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Hugging Face directories Qwen3, Qwen2 and Llama."""
    directory = tmp_path_factory.mktemp("models")
    run_ranks(_write_models, 1, str(directory))
    return directory


@pytest.fixture(scope="session")
def references(models: Path) -> dict[str, Any]:
    """Family -> `tiny_models.Reference`."""
    return run_ranks(_references, 1, str(models))[0]
