"""The files of a model directory: what they are called, which kind of weights is there, and JSON objects among them.

In: a directory. Out: names and parsed objects. Must never import torch, nor look into weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
METADATA_FILE = ".metadata"
MEGATRON_CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"
DATA_SUFFIX = ".distcp"


def holds_megatron_checkpoint(path: str | Path) -> bool:
    """Whether a directory holds a Megatron dist-checkpoint, or the remains of one that was never finished."""
    directory = Path(path)
    return (directory / METADATA_FILE).is_file() or any(True for _ in directory.glob(f"*{DATA_SUFFIX}"))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError names the file that holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}; it must hold a JSON object")
    return value
