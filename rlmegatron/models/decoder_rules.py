"""The parameter rules of a decoder's parts: embeddings, attention of both kinds, MLP, experts.

In: an `Architecture` and a layer number. Out: `Rule`s in the order of a Hugging Face checkpoint. A family with other
parts or names adds a function here and its own order in its file. Pure; must never import torch or megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Part, Rule

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
_HERE = "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls its mixture of experts, below `model.layers.N.`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def decoder_rules(arch: Architecture, padded_vocab: int, *, names: ExpertNames | None = None) -> Iterator[Rule]:
    """A whole decoder of either kind of attention and of MLP."""
    names = names or ExpertNames()
    embedding = Part(EMBEDDING, (arch.vocab_size, arch.hidden_size))
    yield Rule("embedding.word_embeddings.weight", (embedding,), dim=0, padded=padded_vocab)
    for layer in range(arch.num_layers):
        yield from latent_attention_rules(arch, layer) if arch.latent else attention_rules(arch, layer)
        yield from moe_rules(arch, layer, names) if arch.is_moe_layer(layer) else mlp_rules(arch, layer)
    yield Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", (arch.hidden_size,)),))
    if arch.value_head:
        yield Rule("value_head.weight", (Part(VALUE_HEAD, (1, arch.hidden_size)),))
        return
    head = embedding if arch.tied_embeddings else Part(HEAD, embedding.shape)
    yield Rule("output_layer.weight", (head,), dim=0, padded=padded_vocab, copy=arch.tied_embeddings)


def attention_rules(arch: Architecture, layer: int) -> Iterator[Rule]:
    """Grouped-query attention and the norm before it."""
    there = f"model.layers.{layer}."
    attention, here = there + "self_attn.", _HERE + "self_attention."
    hidden, groups = arch.hidden_size, arch.num_kv_heads
    queries, keys = arch.num_heads * arch.head_dim, groups * arch.head_dim
    yield Rule(
        _HERE + "input_layernorm.weight",
        (Part(there + "input_layernorm.weight", (hidden,)),),
        layer=layer,
        fused=here + "linear_qkv.layer_norm_weight",
    )
    sizes = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    weights = tuple(Part(f"{attention}{name}.weight", (size, hidden)) for name, size in sizes)
    yield Rule(here + "linear_qkv.weight", weights, dim=0, blocks=groups, layer=layer)
    if arch.qkv_bias:
        biases = tuple(Part(f"{attention}{name}.bias", (size,)) for name, size in sizes)
        yield Rule(here + "linear_qkv.bias", biases, dim=0, blocks=groups, layer=layer)
    if arch.qk_norm:
        for name in ("q", "k"):
            norm = Part(f"{attention}{name}_norm.weight", (arch.head_dim,))
            yield Rule(f"{here}{name}_layernorm.weight", (norm,), layer=layer)
    output = Part(attention + "o_proj.weight", (hidden, queries))
    yield Rule(here + "linear_proj.weight", (output,), dim=1, layer=layer)


def latent_attention_rules(arch: Architecture, layer: int) -> Iterator[Rule]:
    """Multi-head latent attention; the projections into latent space are whole on every rank."""
    latent = arch.latent
    assert latent is not None
    there = f"model.layers.{layer}."
    attention, here = there + "self_attn.", _HERE + "self_attention."
    hidden, heads = arch.hidden_size, arch.num_heads
    queries = heads * latent.key_dim
    yield Rule(_HERE + "input_layernorm.weight", (Part(there + "input_layernorm.weight", (hidden,)),), layer=layer)
    if latent.q_rank is None:
        whole = Part(attention + "q_proj.weight", (queries, hidden))
        yield Rule(here + "linear_q_proj.weight", (whole,), dim=0, layer=layer)
    else:
        down = Part(attention + "q_a_proj.weight", (latent.q_rank, hidden))
        norm = Part(attention + "q_a_layernorm.weight", (latent.q_rank,))
        up = Part(attention + "q_b_proj.weight", (queries, latent.q_rank))
        yield Rule(here + "linear_q_down_proj.weight", (down,), layer=layer)
        yield Rule(here + "q_layernorm.weight", (norm,), layer=layer, fused=here + "linear_q_up_proj.layer_norm_weight")
        yield Rule(here + "linear_q_up_proj.weight", (up,), dim=0, layer=layer)
    down = Part(attention + "kv_a_proj_with_mqa.weight", (latent.kv_rank + latent.rope_dim, hidden))
    norm = Part(attention + "kv_a_layernorm.weight", (latent.kv_rank,))
    up = Part(attention + "kv_b_proj.weight", (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank))
    output = Part(attention + "o_proj.weight", (hidden, heads * latent.value_dim))
    yield Rule(here + "linear_kv_down_proj.weight", (down,), layer=layer)
    yield Rule(here + "kv_layernorm.weight", (norm,), layer=layer, fused=here + "linear_kv_up_proj.layer_norm_weight")
    yield Rule(here + "linear_kv_up_proj.weight", (up,), dim=0, layer=layer)
    yield Rule(here + "linear_proj.weight", (output,), dim=1, layer=layer)


def mlp_rules(arch: Architecture, layer: int) -> Iterator[Rule]:
    """A gated MLP and the norm before it."""
    there, hidden = f"model.layers.{layer}.", arch.hidden_size
    yield Rule(
        _HERE + "pre_mlp_layernorm.weight",
        (Part(there + "post_attention_layernorm.weight", (hidden,)),),
        layer=layer,
        fused=_HERE + "mlp.linear_fc1.layer_norm_weight",
    )
    yield from _gated(_HERE + "mlp.", there + "mlp.", hidden, arch.ffn_size, ExpertNames(), layer=layer)


def moe_rules(arch: Architecture, layer: int, names: ExpertNames) -> Iterator[Rule]:
    """Router, experts and shared expert, and the norm before them."""
    experts = arch.experts
    assert experts is not None
    there, hidden = f"model.layers.{layer}.", arch.hidden_size
    block, here = f"{there}{names.block}.", _HERE + "mlp."
    norm = Part(there + "post_attention_layernorm.weight", (hidden,))
    yield Rule(_HERE + "pre_mlp_layernorm.weight", (norm,), layer=layer)
    yield Rule(here + "router.weight", (Part(block + "gate.weight", (experts.num, hidden)),), layer=layer)
    if experts.bias:
        bias = Part(block + "gate.e_score_correction_bias", (experts.num,))
        yield Rule(here + "router.expert_bias", (bias,), layer=layer, keeps_fp32=True)
    for expert in range(experts.num):
        local, there_too = here + "experts.local_experts.{expert}.", f"{block}experts.{expert}."
        yield from _gated(local, there_too, hidden, experts.ffn, names, layer=layer, expert=expert)
    if experts.shared_ffn:
        shared = block + "shared_experts."
        yield from _gated(here + "shared_experts.", shared, hidden, experts.shared_ffn, ExpertNames(), layer=layer)


def _gated(
    here: str, there: str, hidden: int, ffn: int, names: ExpertNames, *, layer: int, expert: int | None = None
) -> Iterator[Rule]:
    gated = tuple(Part(f"{there}{name}.weight", (ffn, hidden)) for name in (names.gate, names.up))
    down = Part(f"{there}{names.down}.weight", (hidden, ffn))
    for linear, parts, dim in (("linear_fc1", gated, 0), ("linear_fc2", (down,), 1)):
        # Transformer Engine's grouped linear holds one weight per local expert.
        grouped = f"{_HERE}mlp.experts.{linear}.weight{{expert}}" if expert is not None else None
        yield Rule(f"{here}{linear}.weight", parts, dim=dim, layer=layer, expert=expert, fused=grouped)
