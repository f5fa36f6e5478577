"""Small model directories and config files for tests that look at files but load no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config import yaml_text

# The quickstart's model: 986,240 parameters, counted with transformers.
TINY_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 14,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def safetensors_bytes() -> bytes:
    """A safetensors file without tensors: the header's length, then the header."""
    return (2).to_bytes(8, "little") + b"{}"


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """`make_model(name, hidden_size=..., ...)` writes a Hugging Face directory of a tiny Qwen3; None drops a key."""

    def make(name: str = "model", **changes: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        config = {key: value for key, value in {**TINY_QWEN3, **changes}.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "model.safetensors").write_bytes(safetensors_bytes())
        (directory / "tokenizer.json").write_text("{}")
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        return directory

    return make


@pytest.fixture
def make_config(tmp_path: Path, make_model: Callable[..., Path]) -> Callable[..., Path]:
    """`make_config({"rollout.tensor": 2, ...})` writes a whole, valid config, with those keys set, and its files."""

    def make(changes: dict[str, Any] | None = None) -> Path:
        model = tmp_path / "model"
        if not model.exists():
            make_model()
        train = tmp_path / "train.jsonl"
        train.write_text('{"prompt": "1=", "answer": "1"}\n')
        config: dict[str, Any] = {
            "name": "tiny",
            "run_dir": str(tmp_path / "runs" / "tiny"),
            "model": {"path": str(model)},
            "rollout": {"prompts_per_step": 16, "samples_per_prompt": 4, "max_new_tokens": 6},
            "data": {"train": [{"path": str(train)}], "max_prompt_tokens": 8},
            "train": {"steps": 10},
        }
        for key, value in (changes or {}).items():
            *sections, name = key.split(".")
            target = config
            for section in sections:
                target = target.setdefault(section, {})
            target[name] = value
        path = tmp_path / "run.yaml"
        path.write_text(yaml_text.dump(config))
        return path

    return make
