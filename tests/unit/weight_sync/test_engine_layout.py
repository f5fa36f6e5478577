"""Where SGLang keeps each tensor, against loaders written as loops; SGLang itself has a file of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loading_engine import LoadingEngine
from random_checkpoint import NAMES, architecture, checkpoint

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_loader import loadable

NUM_EXPERTS = {
    "Qwen3MoeForCausalLM": "num_experts",
    "MixtralForCausalLM": "num_local_experts",
    "DeepseekV2ForCausalLM": "n_routed_experts",
    "DeepseekV3ForCausalLM": "n_routed_experts",
}


@st.composite
def engines(draw: st.DrawFn) -> tuple[Architecture, int, int, bool]:
    """An architecture, an engine's TP and EP and whether it runs on a CPU; on a GPU everything comes out even."""
    name, on_cpu, tp = draw(st.sampled_from(NAMES)), draw(st.booleans()), draw(st.sampled_from([1, 2, 3, 4, 6]))
    latent = name.startswith("Deepseek")
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 12) if on_cpu or tp % n == 0 or n % tp == 0]))
    whole, layers = 1 if on_cpu else tp, draw(st.integers(1, 3))
    heads = kv_heads * whole * (1 if latent else draw(st.integers(1, 2)))
    changes: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 300)),
        "hidden_size": draw(st.integers(1, 4)),
        "intermediate_size": whole * draw(st.integers(1, 3)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if latent else kv_heads,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if latent:
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        changes |= {size: 2 * draw(st.integers(1, 2)) for size in sizes}
        changes["q_lora_rank"] = draw(st.sampled_from([None, 3]))
        changes["first_k_dense_replace"] = draw(st.integers(0, layers - 1))
    else:
        changes["head_dim"] = 2 * draw(st.integers(1, 2))
    if name == "MixtralForCausalLM":
        changes["hidden_size"] = heads * changes["head_dim"]
    if latent or name == "Qwen3MoeForCausalLM":
        changes["moe_intermediate_size"] = whole * draw(st.integers(1, 3))
    ep = draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0])) if name in NUM_EXPERTS else 1
    if ep > 1:
        changes[NUM_EXPERTS[name]] = 2 * ep * draw(st.integers(1, 2))
    return architecture(name, **changes), tp, ep, on_cpu


@settings(deadline=None)
@given(engines())
def test_boxes_hold_what_the_loaders_put_there(case: tuple[Architecture, int, int, bool]) -> None:
    """Every element of every engine parameter, once, apart from padding, which is zero."""
    arch, tp, ep, on_cpu = case
    tensors = checkpoint(arch)
    engine = LoadingEngine(arch, tensor=tp, expert=ep, on_cpu=on_cpu)
    for bucket in loadable([list(tensors.items())], arch):
        engine.update_weights(bucket)
    used = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in tensors.items()}
    for rank in range(tp):
        live = engine.parameters(rank)
        live |= {
            name.replace("w_vc", "w_vc.mT"): t.mT if "w_vc" in name else t for name, t in engine.derived(rank).items()
        }
        covered = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in live.items()}
        for box in placements(arch, tp=tp, rank=rank, on_cpu=on_cpu, ep=ep):
            home, source = box.homes[0], tensors[box.name][slices(box.source)]
            assert torch.equal(live[home.parameter][slices(home.box)].reshape(source.shape), source), box
            covered[home.parameter][slices(home.box)] += 1
            used[box.name][slices(box.source)] += 1
        for name, count in covered.items():
            assert int(count.max()) <= 1 and bool((live[name][count == 0] == 0).all()), name
    assert all(bool((count > 0).all()) for count in used.values())


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_neighbours_hold_the_same_kv_head_on_a_gpu(rank: int, head: int) -> None:
    """4 ranks, 2 KV heads of 4 rows: with 12 query heads each rank has 12 rows of queries before the keys."""
    arch = architecture("Qwen2ForCausalLM")
    found = {box.name: box for box in placements(arch, tp=4, rank=rank, on_cpu=False)}
    keys = found["model.layers.0.self_attn.k_proj.weight"]
    assert keys.source == ((4 * head, 4 * head + 4), (0, 48))
    assert keys.homes[0].box == ((12, 16), (0, 48))
    assert keys.homes[0].parameter == "model.layers.0.self_attn.qkv_proj.weight"
    assert found["model.layers.1.self_attn.v_proj.bias"].homes[0].box == ((16, 20),)


def test_on_a_cpu_surplus_ranks_hold_no_head() -> None:
    """4 ranks, 2 KV heads: SGLang makes that 4 KV heads with 6 query heads each, of which 2 ranks have nothing real."""
    arch = architecture("Qwen2ForCausalLM")
    found = [{box.name: box for box in placements(arch, tp=4, rank=rank, on_cpu=True)} for rank in range(4)]
    keys, output = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    assert [boxes[keys].source[0] if keys in boxes else None for boxes in found] == [(0, 4), (4, 8), None, None]
    assert found[0][keys].homes[0].box[0] == (24, 28)
    assert [boxes[output].source[1] if output in boxes else None for boxes in found] == [(0, 24), (24, 48), None, None]


@pytest.mark.parametrize(("on_cpu", "rows"), [(True, 32), (False, 20)])
def test_experts_are_slices_of_one_parameter_with_up_below_gate(on_cpu: bool, rows: int) -> None:
    """40 inner rows on 2 ranks: 20 each, or, padded to 64 on a CPU, 32 on the first."""
    arch = architecture("MixtralForCausalLM", intermediate_size=40)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    found = {box.name: box for box in placements(arch, tp=2, rank=0, on_cpu=on_cpu)}[name]
    assert found.source == ((0, rows), (0, 48))
    assert found.homes[0].parameter == "model.layers.1.block_sparse_moe.experts.w13_weight"
    assert found.homes[0].box == ((2, 3), (rows, 2 * rows), (0, 48))


@pytest.mark.parametrize(("rank", "number", "rows"), [(1, None, None), (2, 1, (0, 20)), (3, 1, (20, 40))])
def test_spread_experts_are_numbered_anew_and_cut_over_the_ranks_of_their_part(
    rank: int, number: int | None, rows: tuple[int, int] | None
) -> None:
    """6 experts in 2 parts of 2 ranks: the first part has 0, 1, 2, the second 3, 4, 5, each cut in two."""
    arch = architecture("MixtralForCausalLM", intermediate_size=40, num_local_experts=6)
    name = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    found = {box.name: box for box in placements(arch, tp=4, ep=2, rank=rank, on_cpu=False)}
    if number is None:
        assert name not in found
        return
    assert found[name].source == ((0, 48), rows)
    assert found[name].homes[0].parameter == "model.layers.1.block_sparse_moe.experts.w2_weight"
    assert found[name].homes[0].box == ((number, number + 1), (0, 48), (0, 20))
    assert found["model.layers.1.self_attn.o_proj.weight"].source == ((0, 48), (12 * rank, 12 * rank + 12))


def test_spread_experts_leave_a_shared_one_its_own_parameter_cut_over_all_ranks() -> None:
    arch = architecture("DeepseekV3ForCausalLM")
    found = {box.name: box for box in placements(arch, tp=4, ep=2, rank=3, on_cpu=False)}
    shared = found["model.layers.1.mlp.shared_experts.up_proj.weight"]
    assert shared.source == ((24, 32), (0, 48))
    assert [home.parameter for home in shared.homes] == ["model.layers.1.mlp.shared_experts.gate_up_proj.weight"]


@settings(deadline=None)
@given(engines())
def test_layers_that_are_alike_are_placed_as_if_each_were_looked_at_alone(
    case: tuple[Architecture, int, int, bool],
) -> None:
    arch, tp, ep, on_cpu = case
    rules = arch.parameter_rules(1)
    alone = [replace(arch, rules=lambda _arch, _vocab, rule=rule: [rule]) for rule in rules]
    one_by_one = [box for one in alone for box in placements(one, tp=tp, rank=tp - 1, on_cpu=on_cpu, ep=ep)]
    assert list(placements(arch, tp=tp, rank=tp - 1, on_cpu=on_cpu, ep=ep)) == one_by_one


def test_a_single_shared_expert_has_two_possible_homes() -> None:
    """Its own parameter, or, behind 4 others, the number 4 of the experts' parameter."""
    one, two = architecture("DeepseekV3ForCausalLM"), architecture("DeepseekV3ForCausalLM", n_shared_experts=2)
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    first, second = {box.name: box for box in placements(one, tp=2, rank=1, on_cpu=False)}[name].homes
    assert (first.parameter, first.box) == (
        "model.layers.1.mlp.shared_experts.gate_up_proj.weight",
        ((16, 32), (0, 48)),
    )
    assert (second.parameter, second.box) == ("model.layers.1.mlp.experts.w13_weight", ((4, 5), (16, 32), (0, 48)))
    assert len({box.name: box for box in placements(two, tp=2, rank=1, on_cpu=False)}[name].homes) == 1


@pytest.mark.parametrize(("tp", "rows"), [(1, [70]), (2, [64, 6]), (4, [32, 32, 6, 0]), (3, [64, 6, 0])])
def test_vocabulary_is_padded_to_64_and_cut(tp: int, rows: list[int]) -> None:
    """70 rows are padded to 128; 3 does not divide that, so SGLang pads to 192 there."""
    arch = architecture("LlamaForCausalLM")
    found = [
        [box for box in placements(arch, tp=tp, rank=rank, on_cpu=True) if box.name == "lm_head.weight"]
        for rank in range(tp)
    ]
    assert [box[0].homes[0].box[0][1] if box else 0 for box in found] == rows


@pytest.mark.parametrize(("name", "own"), [("Qwen3ForCausalLM", False), ("Qwen3MoeForCausalLM", True)])
def test_tied_embeddings_have_a_head_only_where_sglang_s_class_has_one(name: str, own: bool) -> None:
    found = list(placements(architecture(name, tie_word_embeddings=True), tp=1, rank=0, on_cpu=True))
    assert "lm_head.weight" not in {box.name for box in found}
    assert ("lm_head.weight" in {home.parameter for box in found for home in box.homes}) is own
