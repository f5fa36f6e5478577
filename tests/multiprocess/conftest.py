"""Tiny models and what Hugging Face makes of them, once per session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import write_families
from ranks import run_ranks
from tiny_models import hf_references, write_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Hugging Face directories Qwen3, Qwen2 and Llama."""
    directory = tmp_path_factory.mktemp("models")
    run_ranks(write_models, 1, directory)
    return directory


@pytest.fixture(scope="session")
def references(models: Path) -> dict[str, Any]:
    """Family -> `tiny_models.Reference`."""
    return run_ranks(hf_references, 1, models)[0]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Hugging Face directories, one for each variant of every family."""
    directory = tmp_path_factory.mktemp("families")
    run_ranks(write_families, 1, directory)
    return directory
