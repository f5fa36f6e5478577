"""Llama, Qwen2 and Qwen3: dense decoders with grouped-query attention, gated MLP, RMSNorm and rotary positions.

In: the keys of a Hugging Face config.json. Out: the numbers Megatron needs, and the parameter rules. Pure; must never
import torch or megatron. A config key that would change the numbers and is not understood here is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlmegatron.models.architecture import Architecture, Rope, positive, positive_number, refuse
from rlmegatron.models.rules import Part, Rule

EMBEDDING = "model.embed_tokens.weight"


def read_llama(config: Mapping[str, Any]) -> Architecture:
    """Llama: biases only where the config says so."""
    refuse(config, attention_bias=(False, None), mlp_bias=(False, None))
    return _read(config, qkv_bias=False, qk_norm=False)


def read_qwen2(config: Mapping[str, Any]) -> Architecture:
    """Qwen2 and Qwen2.5: biases on Q, K and V."""
    return _read(config, qkv_bias=True, qk_norm=False)


def read_qwen3(config: Mapping[str, Any]) -> Architecture:
    """Qwen3: RMSNorm on every query and key head, and a head size of its own."""
    refuse(config, attention_bias=(False, None))
    return _read(config, qkv_bias=False, qk_norm=True)


def _read(config: Mapping[str, Any], *, qkv_bias: bool, qk_norm: bool) -> Architecture:
    refuse(config, hidden_act=("silu",), use_sliding_window=(False, None), attention_dropout=(0, 0.0, None))
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ValueError("config.json: layer_types other than 'full_attention' are not supported")
    heads = positive(config, "num_attention_heads")
    hidden = positive(config, "hidden_size")
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise ValueError(f"config.json: num_key_value_heads ({groups}) does not divide num_attention_heads ({heads})")
    return Architecture(
        name=config["architectures"][0],
        num_layers=positive(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_size=positive(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=positive(config, "vocab_size"),
        max_positions=positive(config, "max_position_embeddings"),
        norm_eps=positive_number(config, "rms_norm_eps"),
        rope=Rope.read(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rules=_rules,
    )


def _rules(arch: Architecture, padded_vocab: int) -> Iterator[Rule]:
    embedding = Part(EMBEDDING, (arch.vocab_size, arch.hidden_size))
    yield Rule("embedding.word_embeddings.weight", (embedding,), dim=0, padded=padded_vocab)
    for layer in range(arch.num_layers):
        yield from _attention(arch, layer)
        yield from _mlp(arch, layer)
    yield Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", (arch.hidden_size,)),))
    head = embedding if arch.tied_embeddings else Part("lm_head.weight", embedding.shape)
    yield Rule("output_layer.weight", (head,), dim=0, padded=padded_vocab, copy=arch.tied_embeddings)


def _attention(arch: Architecture, layer: int) -> Iterator[Rule]:
    here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention = there + "self_attn."
    hidden, groups = arch.hidden_size, arch.num_kv_heads
    queries, keys = arch.num_heads * arch.head_dim, groups * arch.head_dim
    yield Rule(
        here + "input_layernorm.weight",
        (Part(there + "input_layernorm.weight", (hidden,)),),
        fused="self_attention.linear_qkv.layer_norm_weight",
    )
    sizes = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    weights = tuple(Part(f"{attention}{name}.weight", (size, hidden)) for name, size in sizes)
    yield Rule(here + "self_attention.linear_qkv.weight", weights, dim=0, blocks=groups)
    if arch.qkv_bias:
        biases = tuple(Part(f"{attention}{name}.bias", (size,)) for name, size in sizes)
        yield Rule(here + "self_attention.linear_qkv.bias", biases, dim=0, blocks=groups)
    if arch.qk_norm:
        for name in ("q", "k"):
            norm = Part(f"{attention}{name}_norm.weight", (arch.head_dim,))
            yield Rule(f"{here}self_attention.{name}_layernorm.weight", (norm,))
    output = Part(attention + "o_proj.weight", (hidden, queries))
    yield Rule(here + "self_attention.linear_proj.weight", (output,), dim=1)


def _mlp(arch: Architecture, layer: int) -> Iterator[Rule]:
    here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, ffn = arch.hidden_size, arch.ffn_size
    yield Rule(
        here + "pre_mlp_layernorm.weight",
        (Part(there + "post_attention_layernorm.weight", (hidden,)),),
        fused="mlp.linear_fc1.layer_norm_weight",
    )
    gated = tuple(Part(f"{there}mlp.{name}.weight", (ffn, hidden)) for name in ("gate_proj", "up_proj"))
    yield Rule(here + "mlp.linear_fc1.weight", gated, dim=0)
    yield Rule(here + "mlp.linear_fc2.weight", (Part(there + "mlp.down_proj.weight", (hidden, ffn)),), dim=1)
