"""What a Hugging Face directory says about its model, read from its small files alone.

In: a directory. Out: a frozen `ModelCard` of numbers, or one `ConfigError` that lists what is missing or broken. Must
never import torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmegatron.config.load import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The numbers of one decoder that layout and memory depend on."""

    path: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    """Longest context the positions cover, RoPE scaling included."""
    has_chat_template: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    num_parameters: int | None
    """Parameters of the whole model, a tied embedding once; None for a family whose count is not known here."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family's transformers config class assumes where config.json is silent."""

    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False


_DENSE_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(num_kv_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(num_kv_heads=32, head_dim=128, qk_norm=True),
}


def read_model_card(path: str, *, key: str = "model.path") -> ModelCard:
    """The card of the Hugging Face directory `path`, whose files are checked for presence (weights, tokenizer) too.

    `key` is the config key the path came from and opens every problem line. Raises ConfigError with all problems.
    """
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ConfigError([f"{key}: {path} {what}; use a Hugging Face directory (config.json, safetensors, tokenizer)"])
    problems = [f"{key}: {problem}" for problem in _weight_problems(directory) + _tokenizer_problems(directory)]
    try:
        card = _card(path, _read_json(directory / "config.json"), has_chat_template=_has_chat_template(directory))
    except ConfigError as error:
        raise ConfigError([*(f"{key}: {problem}" for problem in error.problems), *problems]) from error
    if problems:
        raise ConfigError(problems)
    return card


def count_parameters(card: ModelCard) -> int:
    """Parameters of a dense decoder: grouped-query attention, gated MLP, two norms a layer, rotary positions."""
    outside = card.vocab_size * card.hidden_size * (1 if card.tied_embeddings else 2) + card.hidden_size
    return outside + card.num_layers * layer_parameters(card)


def layer_parameters(card: ModelCard, *, tensor: int = 1) -> int:
    """Parameters of one dense layer on one of `tensor` tensor-parallel ranks; norms and output biases are whole."""
    queries, keys_values = card.num_heads * card.head_dim, 2 * card.num_kv_heads * card.head_dim
    cut = card.hidden_size * (2 * queries + keys_values + 3 * card.ffn_size)
    cut += (queries + keys_values) * card.qkv_bias + 2 * card.ffn_size * card.mlp_bias
    replicated = 2 * card.hidden_size + 2 * card.head_dim * card.qk_norm
    return cut // tensor + replicated + card.hidden_size * (card.out_bias + card.mlp_bias)


def _card(path: str, config: Mapping[str, Any], *, has_chat_template: bool) -> ModelCard:
    problems: list[str] = []
    architecture = _architecture(config, problems)
    family = _DENSE_FAMILIES.get(architecture, _Family())
    required = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    numbers = {name: _whole(config, name, problems) for name in (*required, "max_position_embeddings")}
    heads, hidden = numbers["num_attention_heads"], numbers["hidden_size"]
    kv_heads = _whole(config, "num_key_value_heads", problems, absent=family.num_kv_heads or heads)
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        problems.append(
            f"config.json: no head_dim, and hidden_size ({hidden}) / num_attention_heads ({heads}) is not whole"
        )
    if heads % kv_heads:
        problems.append(f"config.json: num_key_value_heads ({kv_heads}) does not divide num_attention_heads ({heads})")
    head_dim = _whole(config, "head_dim", problems, absent=family.head_dim or max(1, hidden // heads))
    if problems:
        raise ConfigError(problems)
    attention_bias = bool(config.get("attention_bias"))
    card = ModelCard(
        path=path,
        architecture=architecture,
        num_layers=numbers["num_hidden_layers"],
        hidden_size=hidden,
        ffn_size=numbers["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=numbers["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture not in _DENSE_FAMILIES)),
        max_positions=int(numbers["max_position_embeddings"] * _rope_factor(config)),
        has_chat_template=has_chat_template,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias")) and architecture == "LlamaForCausalLM",
        qk_norm=family.qk_norm,
        num_parameters=None,
    )
    if architecture not in _DENSE_FAMILIES:
        return card
    return replace(card, num_parameters=count_parameters(card))


def _architecture(config: Mapping[str, Any], problems: list[str]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    problems.append(f"config.json: architectures is {names!r}; it must be a list of one name, as ['Qwen3ForCausalLM']")
    return ""


def _whole(config: Mapping[str, Any], name: str, problems: list[str], *, absent: int | None = None) -> int:
    """A whole number above 0 from config.json; after a problem 1, so that the other checks can go on."""
    value = config.get(name)
    if value is None and absent is not None:
        return absent
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    given = "has no" if name not in config else f"has {value!r} as"
    problems.append(f"config.json {given} {name}; it must be a whole number above 0")
    return 1


def _rope_factor(config: Mapping[str, Any]) -> float:
    """How far RoPE scaling stretches max_position_embeddings, as SGLang's `get_context_length` has it."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return 1.0
    if "original_max_position_embeddings" in rope or rope.get("rope_type", rope.get("type")) == "llama3":
        return 1.0
    return float(rope.get("factor") or 1.0)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"{path} is missing"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read as JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"{path} holds {type(value).__name__}; it must hold a JSON object"])
    return value


def _weight_problems(directory: Path) -> list[str]:
    if (directory / _INDEX).is_file():
        try:
            shards = _read_json(directory / _INDEX).get("weight_map")
        except ConfigError as error:
            return list(error.problems)
        if not isinstance(shards, dict) or not shards:
            return [f"{directory / _INDEX} has no weight_map"]
        files = [directory / str(name) for name in sorted(set(shards.values()))]
    elif (directory / _SINGLE).is_file():
        files = [directory / _SINGLE]
    else:
        found = " (there is a pytorch_model*.bin: convert it to safetensors)" if list(directory.glob("*.bin")) else ""
        return [f"{directory} has neither {_SINGLE} nor {_INDEX}{found}"]
    return [problem for file in files if (problem := _shard_problem(file))]


def _shard_problem(path: Path) -> str | None:
    """A safetensors file opens with the size of its JSON header; a Git LFS pointer or a cut download does not fit."""
    if not path.is_file():
        return f"{path} is missing, though the index names it"
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    size = path.stat().st_size
    if head.startswith(b"version "):
        return f"{path} is a Git LFS pointer of {size} bytes; fetch the weights with git lfs pull"
    if len(head) < _HEADER_BYTES or int.from_bytes(head, "little") + _HEADER_BYTES > size:
        return f"{path} is not a whole safetensors file ({size} bytes)"
    return None


def _tokenizer_problems(directory: Path) -> list[str]:
    if any(all((directory / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        return []
    looked_for = ", nor ".join(" with ".join(names) for names in _TOKENIZER_FILES)
    return [f"{directory} has no tokenizer: neither {looked_for}"]


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and bool(_read_json(path).get("chat_template"))
