"""What a model directory says of itself, and how a broken one is reported."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config.load import load
from rlmegatron.config.rules import problems
from rlmegatron.models.card import read_model_card
from rlmegatron.platform.torchvision_ops import install_torchvision_hook

MakeModel = Callable[..., Path]


def import_transformers() -> Any:
    install_torchvision_hook()
    return pytest.importorskip("transformers")


def problems_of(directory: Path) -> list[str]:
    with pytest.raises(ValueError) as raised:
        read_model_card(str(directory))
    return str(raised.value).splitlines()


def test_quickstart_model_has_the_number_of_parameters_that_was_counted(make_model: MakeModel) -> None:
    card = read_model_card(str(make_model()))
    assert card.num_parameters == 986_240
    assert (card.architecture, card.num_layers, card.hidden_size, card.ffn_size) == ("Qwen3ForCausalLM", 4, 128, 512)
    assert (card.num_heads, card.num_kv_heads, card.head_dim, card.vocab_size) == (4, 2, 32, 14)
    assert (card.tied_embeddings, card.max_positions, card.has_chat_template) == (True, 4096, True)


def test_a_layer_is_counted_by_what_cuts_it(make_model: MakeModel) -> None:
    layer = read_model_card(str(make_model())).layers[0]
    attention = 128 * (4 * 32) + 2 * 128 * (2 * 32) + (4 * 32) * 128
    norms = 2 * 128 + 2 * 32
    assert (layer.cut, layer.whole, layer.of_experts) == (attention + 3 * 128 * 512, norms, 0)
    assert layer.dense_on_rank(tensor=2, vocab_rows=0) == (attention + 3 * 128 * 512) // 2 + norms


SPARSE: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    **SPARSE,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 32}),
    ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    ("Llama", {"num_key_value_heads": None}),
    ("Mistral", {"sliding_window": None}),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    ("Qwen3Moe", {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 32, **SPARSE}),
    ("DeepseekV2", {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    ("DeepseekV3", {**LATENT, "q_lora_rank": 48, "num_nextn_predict_layers": 0, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("family", "extra"), FAMILIES)
def test_parameters_are_those_that_transformers_builds(
    make_model: MakeModel, family: str, extra: dict[str, Any]
) -> None:
    transformers = import_transformers()
    torch = pytest.importorskip("torch")
    directory = make_model(architectures=[f"{family}ForCausalLM"], **{"head_dim": None, **extra})
    given = json.loads((directory / "config.json").read_text())
    if "q_lora_rank" in extra:  # null means something else than absence, which make_model gives for None
        given["q_lora_rank"] = extra["q_lora_rank"]
        (directory / "config.json").write_text(json.dumps(given))
    config = getattr(transformers, f"{family}Config")(**given)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del built["lm_head.weight"]
    assert read_model_card(str(directory)).num_parameters == sum(built.values())


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


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        # transformers 5 gives this one the original context of 4096, which SGLang takes for stretched already.
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            4096,
        ),
        ({"rope_type": "default"}, 4096),
    ],
)
def test_rope_scaling_stretches_the_positions_as_sglang_counts_them(
    make_model: MakeModel, rope: dict[str, Any], positions: int
) -> None:
    assert read_model_card(str(make_model("a", rope_scaling=rope))).max_positions == positions
    assert read_model_card(str(make_model("b", rope_parameters=rope))).max_positions == positions


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    wanted = (
        "use a directory with config.json and tokenizer with safetensors (Hugging Face) or a Megatron dist-checkpoint"
    )
    assert problems_of(tmp_path / "no") == [f"model.path: {tmp_path / 'no'} does not exist; {wanted}"]
    (tmp_path / "file").touch()
    assert problems_of(tmp_path / "file") == [f"model.path: {tmp_path / 'file'} is a file; {wanted}"]


def test_what_cannot_be_looked_at_is_named(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 300
    assert problems_of(tmp_path / long) == [f"model.path: {tmp_path / long} cannot be looked at: File name too long"]
    directory = make_model()
    index = {"weight_map": {"a": f"{long}.safetensors", "b": "gone.safetensors", "c": 1}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problems_of(directory) == [
        f"model.path: {directory / '1'} is missing, though the index names it",
        f"model.path: {directory / 'gone.safetensors'} is missing, though the index names it",
        f"model.path: {directory / long}.safetensors cannot be looked at: File name too long",
    ]
    stat = os.stat

    def closed(path: str | Path, **options: bool) -> os.stat_result:
        if Path(path).parent == directory:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    # The superuser may enter any directory, so a mode bit would not show this.
    monkeypatch.setattr(os, "stat", closed)
    assert problems_of(directory) == [f"model.path: {directory / '.metadata'} cannot be looked at: Permission denied"]


def test_an_empty_directory_is_told_everything_that_was_looked_for(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [
        f"model.path: {tmp_path / 'config.json'} does not exist; {tmp_path} must be a Hugging Face directory",
        f"model.path: {tmp_path} has neither model.safetensors nor model.safetensors.index.json, nor a Megatron "
        "checkpoint (.metadata)",
        f"model.path: {tmp_path} has no tokenizer: neither tokenizer.json, nor tokenizer.model, "
        "nor vocab.json with merges.txt",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": []}, "architectures is []; it must be a list of one name, as ['Qwen3ForCausalLM']"),
        ({"architectures": ["FooForCausalLM"]}, "architecture FooForCausalLM is not supported; supported: Llama"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number above 0, got 'big'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (4)"),
        ({"logit_softcap": 30.0}, "not understood: logit_softcap = 30.0. Such a key may change the model's numbers"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ],
)
def test_what_a_config_says_and_nobody_understands_is_a_problem_of_the_key_that_named_it(
    make_model: MakeModel, change: dict[str, Any], expected: str
) -> None:
    directory = make_model(**change)
    (problem,) = problems_of(directory)
    assert problem.startswith(f"model.path: {directory}/config.json: {expected}")


def test_a_plan_needs_config_json_alone_and_the_card_says_what_a_run_needs(
    make_config: Callable[..., Path],
) -> None:
    """Without a tokenizer nothing is known of its chat template, so that data.chat_template breaks no rule."""
    cfg = load(make_config())
    directory = Path(cfg.model.path)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    card = read_model_card(str(directory), plans_only=True)
    assert card.absent == (
        f"model.path: {directory} has no weights, which a run will need",
        f"model.path: {directory} has no tokenizer, which a run will need",
    )
    assert card.has_chat_template is None
    assert problems(cfg, world_size=1, card=card) == []

    (directory / "tokenizer.json").write_text("{}")
    card = read_model_card(str(directory), plans_only=True)
    assert (card.absent, card.has_chat_template) == (
        (f"model.path: {directory} has no weights, which a run will need",),
        False,
    )
    assert problems(cfg, world_size=1, card=card) == [
        f"data.chat_template: true, but the tokenizer in {directory} has no chat template; for prompts that are text, "
        "set data.chat_template=false"
    ]


def test_weights_without_a_tokenizer_are_no_plan_but_an_accident(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer: neither tokenizer.json"):
        read_model_card(str(directory), plans_only=True)


def test_a_config_that_is_not_json_is_reported(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "config.json").write_text("{")
    (problem,) = problems_of(directory)
    assert problem.startswith(f"model.path: {directory / 'config.json'} cannot be read as JSON: ")
    (directory / "config.json").write_text("[" * 100_000)
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
        f"model.path: {directory / names[1]}: cannot be read as safetensors: it is a Git LFS pointer, not the file "
        "itself; fetch it with 'git lfs pull'",
        f"model.path: {directory / names[2]}: cannot be read as safetensors: it is truncated: it has 10 bytes and "
        "ends before its header does",
    ]


def test_tensors_that_a_download_cut_off_are_missed(make_model: MakeModel) -> None:
    weights = make_model() / "model.safetensors"
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"1234567")
    whole = 8 + len(header) + 8
    assert problems_of(weights.parent) == [
        f"model.path: {weights}: cannot be read as safetensors: it is truncated: it has {whole - 1} bytes, its header "
        f"describes {whole}"
    ]


def test_pickled_weights_are_not_taken_for_safetensors(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    (problem,) = problems_of(directory)
    assert problem.endswith("(there is a pytorch_model*.bin: convert it to safetensors)")


def megatron_directory(make_model: MakeModel, *missing: str) -> Path:
    directory = make_model()
    (directory / "model.safetensors").unlink()
    for name in {".metadata", "metadata.json", "common.pt", "__0_0.distcp"} - set(missing):
        (directory / name).touch()
    return directory


def test_a_megatron_checkpoint_needs_no_safetensors(make_model: MakeModel) -> None:
    assert read_model_card(str(megatron_directory(make_model))).num_parameters == 986_240


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ((".metadata",), ".metadata"),
        ((".metadata", "metadata.json", "common.pt"), ".metadata, metadata.json, common.pt"),
        (("metadata.json",), "metadata.json"),
        (("__0_0.distcp",), "*.distcp"),
    ],
)
def test_an_interrupted_conversion_is_not_taken_for_a_checkpoint(
    make_model: MakeModel, missing: tuple[str, ...], named: str
) -> None:
    directory = megatron_directory(make_model, *missing)
    assert problems_of(directory) == [
        f"model.path: {directory} holds an unfinished Megatron checkpoint (no {named}): what wrote it was interrupted; "
        "convert again"
    ]


def test_two_kinds_of_weights_in_one_directory_are_refused(make_model: MakeModel) -> None:
    directory = megatron_directory(make_model)
    (directory / "model.safetensors").touch()
    (problem,) = problems_of(directory)
    assert problem.endswith("holds both safetensors and a Megatron checkpoint; use a directory with one of them")
