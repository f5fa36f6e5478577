"""What a model directory says of itself, and how a broken one is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config.load import ConfigError
from rlmegatron.config.model_card import layer_parameters, read_model_card
from rlmegatron.platform.torchvision_ops import install_torchvision_hook

MakeModel = Callable[..., Path]


def import_transformers() -> Any:
    install_torchvision_hook()
    return pytest.importorskip("transformers")


def problems_of(directory: Path) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read_model_card(str(directory))
    return list(raised.value.problems)


def test_quickstart_model_has_the_number_of_parameters_that_was_counted(make_model: MakeModel) -> None:
    card = read_model_card(str(make_model()))
    assert card.num_parameters == 986_240
    assert (card.architecture, card.num_layers, card.hidden_size, card.ffn_size) == ("Qwen3ForCausalLM", 4, 128, 512)
    assert (card.num_heads, card.num_kv_heads, card.head_dim, card.vocab_size) == (4, 2, 32, 14)
    assert (card.tied_embeddings, card.max_positions, card.has_chat_template) == (True, 4096, True)


def test_one_tensor_parallel_rank_of_a_layer_holds_the_numbers_worked_out_by_hand(make_model: MakeModel) -> None:
    card = read_model_card(str(make_model()))
    attention = 128 * (4 * 32) + 2 * 128 * (2 * 32) + (4 * 32) * 128
    norms = 2 * 128 + 2 * 32
    assert layer_parameters(card) == attention + 3 * 128 * 512 + norms
    assert layer_parameters(card, tensor=2) == (attention + 3 * 128 * 512) // 2 + norms


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None}),
    ],
)
def test_parameters_are_those_that_transformers_builds(
    make_model: MakeModel, family: str, extra: dict[str, Any]
) -> None:
    transformers = import_transformers()
    torch = pytest.importorskip("torch")
    head_dim = {} if family == "Qwen3" else {"head_dim": None}
    directory = make_model(architectures=[f"{family}ForCausalLM"], **{**head_dim, **extra})
    config = getattr(transformers, f"{family}Config")(**json.loads((directory / "config.json").read_text()))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert read_model_card(str(directory)).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_keys_that_a_config_leaves_out_have_the_defaults_of_transformers(make_model: MakeModel, family: str) -> None:
    transformers = import_transformers()
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "tie_word_embeddings"))
    sizes = {"hidden_size": 4096, "num_attention_heads": 64}
    directory = make_model(architectures=[f"{family}ForCausalLM"], **sizes, **absent)
    config = getattr(transformers, f"{family}Config")(**json.loads((directory / "config.json").read_text()))
    card = read_model_card(str(directory))
    assert card.num_kv_heads == config.num_key_value_heads
    assert card.tied_embeddings == config.tie_word_embeddings
    # Qwen2's own class has no head_dim: its attention divides, as ours does.
    assert card.head_dim == (getattr(config, "head_dim", None) or 4096 // 64)


def test_a_family_without_a_count_says_so(make_model: MakeModel) -> None:
    assert read_model_card(str(make_model(architectures=["Qwen3MoeForCausalLM"]))).num_parameters is None


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "default"}, 4096),
    ],
)
def test_rope_scaling_stretches_the_positions_as_sglang_counts_them(
    make_model: MakeModel, rope: dict[str, Any], positions: int
) -> None:
    assert read_model_card(str(make_model("a", rope_scaling=rope))).max_positions == positions
    assert read_model_card(str(make_model("b", rope_parameters=rope))).max_positions == positions


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    wanted = "use a Hugging Face directory (config.json, safetensors, tokenizer)"
    assert problems_of(tmp_path / "no") == [f"model.path: {tmp_path / 'no'} does not exist; {wanted}"]
    (tmp_path / "file").touch()
    assert problems_of(tmp_path / "file") == [f"model.path: {tmp_path / 'file'} is a file; {wanted}"]


def test_an_empty_directory_is_told_everything_that_was_looked_for(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [
        f"model.path: {tmp_path / 'config.json'} is missing",
        f"model.path: {tmp_path} has neither model.safetensors nor model.safetensors.index.json",
        f"model.path: {tmp_path} has no tokenizer: neither tokenizer.json, nor tokenizer.model, "
        "nor vocab.json with merges.txt",
    ]


def test_every_bad_number_of_a_config_is_reported(make_model: MakeModel) -> None:
    directory = make_model(hidden_size="big", num_hidden_layers=None, num_key_value_heads=3, architectures=[])
    assert problems_of(directory) == [
        "model.path: config.json: architectures is []; it must be a list of one name, as ['Qwen3ForCausalLM']",
        "model.path: config.json has no num_hidden_layers; it must be a whole number above 0",
        "model.path: config.json has 'big' as hidden_size; it must be a whole number above 0",
        "model.path: config.json: num_key_value_heads (3) does not divide num_attention_heads (4)",
    ]


def test_a_config_that_is_not_json_is_reported(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "config.json").write_text("{")
    (problem,) = problems_of(directory)
    assert problem.startswith(f"model.path: {directory / 'config.json'} cannot be read as JSON: ")


def test_a_missing_shard_a_pointer_and_a_cut_file_are_told_apart(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    names = ["gone.safetensors", "pointer.safetensors", "short.safetensors", "whole.safetensors"]
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / names[1]).write_text("version https://git-lfs.github.com/spec/v1\n")
    (directory / names[2]).write_bytes((100).to_bytes(8, "little") + b"{}")
    (directory / names[3]).write_bytes((2).to_bytes(8, "little") + b"{}")
    assert problems_of(directory) == [
        f"model.path: {directory / names[0]} is missing, though the index names it",
        f"model.path: {directory / names[1]} is a Git LFS pointer of 43 bytes; fetch the weights with git lfs pull",
        f"model.path: {directory / names[2]} is not a whole safetensors file (10 bytes)",
    ]


def test_pickled_weights_are_not_taken_for_safetensors(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    (problem,) = problems_of(directory)
    assert problem.endswith("(there is a pytorch_model*.bin: convert it to safetensors)")
