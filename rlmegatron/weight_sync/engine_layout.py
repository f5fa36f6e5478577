"""Where SGLang keeps each Hugging Face tensor of a dense decoder: its fused parameters under tensor parallelism.

In: an architecture and the engine's (TP size, rank). Out: boxes, as in `models/rules.py`. Pure; must never import torch
or sglang. Checked against SGLang's own loader by digest after every publish.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Box

_VOCAB_PADDING = 64  # sglang/srt/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, slots=True)
class Placement:
    """`engine parameter[target]` holds `tensor(name)[source]`."""

    name: str
    source: Box
    parameter: str
    target: Box


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    shape: tuple[int, ...]
    num_shards: int


def placements(arch: Architecture, *, tp: int, rank: int) -> Iterator[Placement]:
    """Every tensor of the checkpoint as rank `rank` of the engine holds it."""
    vocab = (arch.vocab_size, arch.hidden_size)
    yield from _vocabulary("model.embed_tokens.weight", vocab, tp, rank)
    for layer in range(arch.num_layers):
        yield from _layer(arch, f"model.layers.{layer}.", tp, rank)
    yield _whole("model.norm.weight", (arch.hidden_size,))
    if not arch.tied_embeddings:
        yield from _vocabulary("lm_head.weight", vocab, tp, rank)


def _layer(arch: Architecture, prefix: str, tp: int, rank: int) -> Iterator[Placement]:
    hidden, ffn, attention = arch.hidden_size, arch.ffn_size, prefix + "self_attn."
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    # With more ranks than KV heads, tp / num_kv_heads neighbours hold the same head.
    kv_shards = min(tp, arch.num_kv_heads)
    sizes = (("q_proj", queries, tp), ("k_proj", keys, kv_shards), ("v_proj", keys, kv_shards))
    weights = [_Shard(f"{attention}{name}.weight", (size, hidden), shards) for name, size, shards in sizes]
    yield from _fused(f"{attention}qkv_proj.weight", weights, tp, rank)
    if arch.qkv_bias:
        biases = [_Shard(f"{attention}{name}.bias", (size,), shards) for name, size, shards in sizes]
        yield from _fused(f"{attention}qkv_proj.bias", biases, tp, rank)
    if arch.qk_norm:
        yield _whole(attention + "q_norm.weight", (arch.head_dim,))
        yield _whole(attention + "k_norm.weight", (arch.head_dim,))
    yield _columns(attention + "o_proj.weight", (hidden, queries), tp, rank)
    gated = [_Shard(f"{prefix}mlp.{name}.weight", (ffn, hidden), tp) for name in ("gate_proj", "up_proj")]
    yield from _fused(f"{prefix}mlp.gate_up_proj.weight", gated, tp, rank)
    yield _columns(prefix + "mlp.down_proj.weight", (hidden, ffn), tp, rank)
    yield _whole(prefix + "input_layernorm.weight", (hidden,))
    yield _whole(prefix + "post_attention_layernorm.weight", (hidden,))


def _fused(parameter: str, shards: list[_Shard], tp: int, rank: int) -> Iterator[Placement]:
    offset = 0
    for shard in shards:
        size = shard.shape[0] // shard.num_shards
        start = rank * shard.num_shards // tp * size
        rest = tuple((0, length) for length in shard.shape[1:])
        yield Placement(shard.name, ((start, start + size), *rest), parameter, ((offset, offset + size), *rest))
        offset += size


def _columns(name: str, shape: tuple[int, int], tp: int, rank: int) -> Placement:
    size = shape[1] // tp
    return Placement(name, ((0, shape[0]), (rank * size, (rank + 1) * size)), name, ((0, shape[0]), (0, size)))


def _vocabulary(name: str, shape: tuple[int, int], tp: int, rank: int) -> Iterator[Placement]:
    padding = _VOCAB_PADDING
    if _round_up(shape[0], padding) % tp:
        padding *= tp  # as SGLang does on a CPU; on a GPU it refuses such a TP size
    size = _round_up(shape[0], padding) // tp
    start, stop = rank * size, min((rank + 1) * size, shape[0])
    if stop > start:
        columns = (0, shape[1])
        yield Placement(name, ((start, stop), columns), name, ((0, stop - start), columns))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _whole(name: str, shape: tuple[int, ...]) -> Placement:
    box = tuple((0, size) for size in shape)
    return Placement(name, box, name, box)
