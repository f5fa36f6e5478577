"""What a model directory says about its model, read from its small files alone.

In: a Hugging Face directory, or one that holds a Megatron dist-checkpoint beside the same config.json and tokenizer.
Out: a `ModelCard`, or one ValueError with a line for everything that is missing or broken. Must never import torch,
megatron or transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path

from rlmegatron.config.model_card import Count, ExpertSizes, ModelCard
from rlmegatron.models.architecture import Architecture, Experts
from rlmegatron.models.directory_check import has_tokenizer, tokenizer_problems, weight_problems
from rlmegatron.models.model_files import holds_megatron_checkpoint, read_object
from rlmegatron.models.rules import Rule
from rlmegatron.models.table import read_architecture

_KINDS = "config.json and tokenizer with safetensors (Hugging Face) or a Megatron dist-checkpoint"


def read_model_card(
    path: str, *, key: str = "model.path", for_critic: bool = False, plans_only: bool = False
) -> ModelCard:
    """The card of the model directory `path`, whose files are checked for presence (weights, tokenizer) too.

    `key` is the config key the path came from and opens every line of the ValueError, which lists all problems. Only
    what a critic starts from (`for_critic`) may be a reward model. With `plans_only` a directory without any weights
    will do, with a tokenizer or without, as a layout follows from config.json; the card says so.
    """
    try:
        return _read_card(path, key=key, for_critic=for_critic, plans_only=plans_only)
    except OSError as error:
        raise ValueError(f"{key}: {error.filename or path} cannot be looked at: {error.strerror}") from None


def _read_card(path: str, *, key: str, for_critic: bool, plans_only: bool) -> ModelCard:
    directory = Path(path)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ValueError(f"{key}: {path} {what}; use a directory with {_KINDS}")
    has_weights = holds_megatron_checkpoint(directory) or any(directory.glob("*.safetensors*"))
    absent = [] if has_weights or not plans_only else [f"{key}: {path} has no weights, which a run will need"]
    problems = [] if absent else weight_problems(directory) + tokenizer_problems(directory)
    if absent and not has_tokenizer(directory):
        absent.append(f"{key}: {path} has no tokenizer, which a run will need")
    architecture, has_chat_template = None, None
    try:
        has_chat_template = _has_chat_template(directory)
    except ValueError as error:
        problems.insert(0, str(error))
    try:
        architecture = read_architecture(path, for_critic=for_critic)
    except ValueError as error:
        problems.insert(0, str(error))
    if problems or architecture is None:
        raise ValueError("\n".join(f"{key}: {problem}" for problem in problems))
    card = model_card(architecture, path=path, has_chat_template=has_chat_template)
    return replace(card, absent=tuple(absent))


def model_card(arch: Architecture, *, path: str, has_chat_template: bool | None) -> ModelCard:
    """The card of an architecture; parameters are counted from its rules."""
    first, layers, last, copies = _counts(arch)
    latent = arch.latent
    heads_and_groups = 2 * (arch.num_heads + arch.num_kv_heads)
    return ModelCard(
        path=path,
        architecture=arch.name,
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_size=arch.ffn_size,
        num_heads=arch.num_heads,
        num_kv_heads=None if latent else arch.num_kv_heads,
        head_dim=latent.key_dim if latent else arch.head_dim,
        vocab_size=arch.vocab_size,
        tied_embeddings=arch.tied_embeddings,
        max_positions=_max_positions(arch),
        has_chat_template=has_chat_template,
        has_value_head=arch.value_head,
        attention_values=(
            2 * arch.num_heads * (latent.key_dim + latent.value_dim) if latent else heads_and_groups * arch.head_dim
        ),
        # Each compressed value is kept before and after its norm; the rotary key has none.
        latent_values=2 * ((latent.q_rank or 0) + latent.kv_rank) + latent.rope_dim if latent else 0,
        cached_values=latent.kv_rank + latent.rope_dim if latent else 2 * arch.num_kv_heads * arch.head_dim,
        experts=_expert_sizes(arch.experts) if arch.experts else None,
        left_out=tuple(reason for _, reason in arch.dropped),
        first=first,
        layers=layers,
        last=last,
        copies=copies,
    )


def _expert_sizes(experts: Experts) -> ExpertSizes:
    return ExpertSizes(
        num=experts.num,
        top_k=experts.top_k,
        ffn=experts.ffn,
        shared_ffn=experts.shared_ffn,
        layers=experts.layers,
        has_bias=experts.bias,
    )


def _counts(arch: Architecture) -> tuple[Count, tuple[Count, ...], Count, Count]:
    """Of the first stage, of every layer, of the last stage, and of its copies.

    A value head counts nowhere: whatever a critic starts from, it has one (`estimate.rank_parameters` adds it).
    """
    first: list[Rule] = []
    last: list[Rule] = []
    copies: list[Rule] = []
    layers: list[list[Rule]] = [[] for _ in range(arch.num_layers)]
    for rule in arch.parameter_rules(1):
        if rule.layer is not None:
            layers[rule.layer].append(rule)
        elif rule.path.startswith("embedding."):
            first.append(rule)
        elif not rule.path.startswith("value_head."):
            (copies if rule.copy else last).append(rule)
    return _count(first), tuple(_count(layer) for layer in layers), _count(last), _count(copies)


def _count(rules: Iterable[Rule]) -> Count:
    found = {"cut": 0, "whole": 0, "expert_cut": 0, "expert_whole": 0, "per_token": 0}
    for rule in rules:
        size = sum(prod(part.shape) for part in rule.parts)
        if rule.padded is not None:
            assert rule.dim is not None, f"{rule.path} is padded along no dimension"
            found["per_token"] += size // rule.parts[0].shape[rule.dim]
        else:
            kind = "whole" if rule.dim is None else "cut"
            found[kind if rule.axis == "tp" else f"expert_{kind}"] += size
    return Count(**found)


def _max_positions(arch: Architecture) -> int:
    """As SGLang's `get_context_length` counts them under transformers 5.

    That gives the llama3 and yarn kinds `original_max_position_embeddings` if they have none, and where those are known
    max_position_embeddings holds already for the stretched context.
    """
    is_stretched = arch.rope.kind == "linear" and not arch.rope.original_positions
    return int(arch.max_positions * arch.rope.factor) if is_stretched else arch.max_positions


def _has_chat_template(directory: Path) -> bool | None:
    """None without a tokenizer, whose template may come with it."""
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    path = directory / "tokenizer_config.json"
    if path.is_file() and read_object(path).get("chat_template"):
        return True
    return False if has_tokenizer(directory) else None
