"""Where SGLang keeps the tensors of an attention layer: fused projections, grouped-query or latent.

In: one tensor, the architecture and an engine's rank. Out: its `Placement`s. Pure; must never import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.models.architecture import Architecture, LatentAttention
from rlmegatron.models.rules import Part
from rlmegatron.weight_sync.engine_placement import Home, Placement, Slot, cut, whole
from rlmegatron.weight_sync.engine_rank import EngineRank


def attention_placements(part: Part, arch: Architecture, here: EngineRank) -> Iterator[Placement]:
    """One tensor below `self_attn.`."""
    block, module, kind = part.name.rsplit(".", 2)
    if module.endswith("norm"):
        yield whole(part)
    elif module == "o_proj":
        queries, _ = here.heads(arch.num_heads, arch.num_kv_heads)
        width = arch.latent.value_dim if arch.latent else arch.head_dim
        yield from cut(part, 1, queries.times(width), Slot(part.name))
    elif arch.latent:
        yield from _latent(part, arch.latent, arch, here, block=block, module=module)
    else:
        yield from _grouped(part, arch, here, parameter=f"{block}.qkv_proj.{kind}", module=module)


def _grouped(part: Part, arch: Architecture, here: EngineRank, *, parameter: str, module: str) -> Iterator[Placement]:
    """Q, K and V of a rank lie below each other."""
    query_heads, kv_heads = here.heads(arch.num_heads, arch.num_kv_heads)
    queries, keys = query_heads.times(arch.head_dim), kv_heads.times(arch.head_dim)
    places = {"q_proj": (queries, 0), "k_proj": (keys, queries.room), "v_proj": (keys, queries.room + keys.room)}
    assert module in places, f"nobody knows where SGLang keeps {part.name}"
    share, offset = places[module]
    yield from cut(part, 0, share, Slot(parameter, offset, queries.room + 2 * keys.room))


def _latent(
    part: Part, latent: LatentAttention, arch: Architecture, here: EngineRank, *, block: str, module: str
) -> Iterator[Placement]:
    """Projections into latent space are whole on every rank, and one parameter where queries have such a space too."""
    heads, _ = here.heads(arch.num_heads, arch.num_kv_heads)
    if module in ("q_a_proj", "kv_a_proj_with_mqa"):
        if latent.q_rank is None:
            yield whole(part)
            return
        fused, rows = f"{block}.fused_qkv_a_proj_with_mqa.weight", latent.q_rank + latent.kv_rank + latent.rope_dim
        yield whole(part, parameter=fused, offset=0 if module == "q_a_proj" else latent.q_rank, rows=rows)
    elif module == "kv_b_proj":
        yield from cut(part, 0, heads.times(latent.nope_dim + latent.value_dim), Slot(part.name))
        for head in range(heads.start, heads.stop):
            yield from _absorbed(part, latent, head, head - heads.start, block)
    else:
        assert module in ("q_proj", "q_b_proj"), f"nobody knows where SGLang keeps {part.name}"
        yield from cut(part, 0, heads.times(latent.key_dim), Slot(part.name))


def _absorbed(part: Part, latent: LatentAttention, head: int, local: int, block: str) -> Iterator[Placement]:
    """The copies of a head's keys and values with which SGLang decodes; its loader derives them from `kv_b_proj`."""
    first, columns = head * (latent.nope_dim + latent.value_dim), (0, latent.kv_rank)
    for copy, start, length in (("w_kc", 0, latent.nope_dim), ("w_vc.mT", latent.nope_dim, latent.value_dim)):
        source = ((first + start, first + start + length), columns)
        home = Home(f"{block}.{copy}", ((local, local + 1), (0, length), columns), (None, length, latent.kv_rank))
        yield Placement(part.name, source, (home,), is_derived=True)
