"""What is read from a Hugging Face config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.models.architecture import Rope
from rlmegatron.models.table import read_architecture

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Rope(10000.0)),
        ({"rope_theta": 1000000}, Rope(1e6)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, Rope(5e5, 8.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 32}}, Rope(5e5, 32.0)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, Rope(5e5, 8.0)),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.0}, Rope(1e4)),
    ],
)
def test_both_spellings_of_rope_are_read(config: dict[str, Any], expected: Rope) -> None:
    assert Rope.read(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0}},
            "low_freq_factor = 2.0 is not supported; use 1.0",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' needs a factor"),
    ],
)
def test_rope_that_megatron_lacks_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rope.read(config)


def test_transformers_writes_what_is_read(tmp_path: Path) -> None:
    """Also the head size that is not hidden size / heads, and the KV heads."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=40, num_hidden_layers=3, vocab_size=50,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0}, tie_word_embeddings=True, rms_norm_eps=3e-6,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    arch = read_architecture(str(tmp_path))
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (3, 96, 4, 2, 40)
    assert (arch.vocab_size, arch.rope, arch.tied_embeddings, arch.norm_eps) == (50, Rope(12345.0), True, 3e-6)
    assert arch.qk_norm and not arch.qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": None}, r"architecture \(none\) is not supported"),
        ({"hidden_size": 0}, "hidden_size must be a whole number above 0, got 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number above 0, got None"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number above 0, got None"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types other than 'full_attention'"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads .3. does not divide"),
    ],
)
def test_what_is_not_understood_is_refused(make_model: Any, changes: dict[str, Any], message: str) -> None:
    directory = make_model(**changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_architecture(str(directory))
    assert str(directory) in str(caught.value)


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.path: .*config.json does not exist"):
        read_architecture(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]})[:-5])
    with pytest.raises(ValueError, match=r"config.json: cannot be read as JSON"):
        read_architecture(str(tmp_path))
