"""Where SGLang keeps each tensor, against loaders written as loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading_engine import LoadingEngine
from random_checkpoint import architecture, checkpoint

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.weight_sync.engine_layout import placements

NAMES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@st.composite
def architectures(draw: st.DrawFn) -> tuple[Architecture, int]:
    """An architecture and an engine size it can be cut for: KV heads are divided or replicated."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12) if tp % n == 0 or n % tp == 0]))
    heads = draw(st.integers(1, 2)) * tp * kv_heads
    arch = architecture(
        draw(st.sampled_from(NAMES)),
        vocab_size=draw(st.integers(1, 300)),
        hidden_size=draw(st.integers(1, 4)),
        intermediate_size=tp * draw(st.integers(1, 3)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        tie_word_embeddings=draw(st.booleans()),
    )
    return arch, tp


@settings(deadline=None)
@given(architectures())
def test_boxes_hold_what_the_loaders_put_there(case: tuple[Architecture, int]) -> None:
    """Every element of every engine parameter, once, apart from the padding of the vocabulary."""
    arch, tp = case
    tensors = checkpoint(arch)
    engine = LoadingEngine(arch, tensor=tp)
    engine.update_weights(list(tensors.items()))
    used = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in tensors.items()}
    for rank in range(tp):
        live = engine.parameters(rank)
        covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in live.items()}
        for box in placements(arch, tp=tp, rank=rank):
            assert torch.equal(live[box.parameter][slices(box.target)], tensors[box.name][slices(box.source)]), box
            covered[box.parameter][slices(box.target)] += 1
            used[box.name][slices(box.source)] += 1
        for name, count in covered.items():
            padding = "embed_tokens" in name or "lm_head" in name
            rows = count[: max(0, min(len(count), arch.vocab_size - rank * len(count)))] if padding else count
            assert bool((rows == 1).all()) and int(count.sum()) == rows.numel(), name
    assert all(bool((count > 0).all()) for count in used.values())


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_neighbours_hold_the_same_kv_head(rank: int, head: int) -> None:
    """4 ranks, 2 KV heads of 3 rows: with 12 query heads each rank has 9 rows of queries before the keys."""
    arch = architecture("Qwen2ForCausalLM")
    found = {box.name: box for box in placements(arch, tp=4, rank=rank)}
    keys = found["model.layers.0.self_attn.k_proj.weight"]
    assert keys.source == ((3 * head, 3 * head + 3), (0, 8))
    assert keys.target == ((9, 12), (0, 8))
    assert keys.parameter == "model.layers.0.self_attn.qkv_proj.weight"
    assert found["model.layers.1.self_attn.v_proj.bias"].target == ((12, 15),)


@pytest.mark.parametrize(("tp", "rows"), [(1, [70]), (2, [64, 6]), (4, [32, 32, 6, 0]), (3, [64, 6, 0])])
def test_vocabulary_is_padded_to_64_and_cut(tp: int, rows: list[int]) -> None:
    """70 rows are padded to 128; 3 does not divide that, so SGLang pads to 192 there."""
    arch = architecture("LlamaForCausalLM")
    found = [[box for box in placements(arch, tp=tp, rank=rank) if box.name == "lm_head.weight"] for rank in range(tp)]
    assert [box[0].target[0][1] if box else 0 for box in found] == rows


def test_tied_embeddings_have_no_head_of_their_own() -> None:
    for tied in (True, False):
        arch = architecture("Qwen3ForCausalLM", tie_word_embeddings=tied)
        assert ("lm_head.weight" in {box.name for box in placements(arch, tp=1, rank=0)}) is not tied
