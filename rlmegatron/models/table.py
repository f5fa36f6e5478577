"""The families: a Hugging Face architecture name to the function that reads its config. A new family is one line here.

In: a model directory. Out: its `Architecture`. Must never import torch or megatron.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.families import dense

FAMILIES = {
    "LlamaForCausalLM": dense.read_llama,
    "Qwen2ForCausalLM": dense.read_qwen2,
    "Qwen3ForCausalLM": dense.read_qwen3,
}


def read_architecture(directory: str) -> Architecture:
    """Read config.json of `directory`; ValueError names the file and what is not understood."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path: {path} does not exist; model.path must be a Hugging Face directory")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    names = config.get("architectures") or ["(none)"]
    if names[0] not in FAMILIES:
        raise ValueError(f"{path}: architecture {names[0]} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[names[0]](config)
    except ValueError as error:
        raise ValueError(f"{directory}/{error}") from None
