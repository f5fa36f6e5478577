"""The text of --check: its numbers follow the layout, and it stays short for many ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.config.load import load
from rlmegatron.config.report import check_report, in_units, spans
from rlmegatron.models.card import read_model_card

MakeConfig = Callable[..., Path]


def report(
    path: Path, *overrides: str, world_size: int, per_node: int | None = None, warnings: tuple[str, ...] = ()
) -> list[str]:
    cfg = load(path, overrides)
    text = check_report(
        cfg,
        world_size=world_size,
        world_size_from="from --ranks",
        ranks_per_node=per_node,
        card=read_model_card(cfg.model.path),
        warnings=warnings,
    )
    return text.splitlines()


def test_each_rank_of_a_small_world_is_listed_with_its_place_layers_and_engine(make_config: MakeConfig) -> None:
    lines = report(make_config(), "parallel={tensor: 2, pipeline: 2}", "rollout.tensor=2", world_size=8)
    start = lines.index("ranks")
    assert [line.split() for line in lines[start + 1 : start + 10]] == [
        ["rank", "tp", "dp", "pp", "holds", "engine"],
        ["0", "0", "0", "0", "embedding,", "layers", "0-1", "0", "(owns", "its", "server)"],
        ["1", "1", "0", "0", "embedding,", "layers", "0-1", "0"],
        ["2", "0", "1", "0", "embedding,", "layers", "0-1", "1", "(owns", "its", "server)"],
        ["3", "1", "1", "0", "embedding,", "layers", "0-1", "1"],
        ["4", "0", "0", "1", "layers", "2-3,", "output", "2", "(owns", "its", "server)"],
        ["5", "1", "0", "1", "layers", "2-3,", "output", "2"],
        ["6", "0", "1", "1", "layers", "2-3,", "output", "3", "(owns", "its", "server)"],
        ["7", "1", "1", "1", "layers", "2-3,", "output", "3"],
    ]
    assert "  data parallel      4 of 2:  {0, 2}, {1, 3}, {4, 6}, {5, 7}" in lines
    assert "  pipeline parallel  4 of 2:  {0, 4}, {1, 5}, {2, 6}, {3, 7}" in lines
    assert "world   8 ranks (from --ranks) = TP 2 x PP 2 x DP 2, distributed optimizer" in lines


def test_engines_of_more_ranks_than_training_groups_are_listed_in_their_own_order(make_config: MakeConfig) -> None:
    lines = report(make_config(), "parallel.tensor=2", "rollout.tensor=4", world_size=8)
    start = lines.index("ranks")
    assert [line.partition("output")[2].split() for line in lines[start + 2 : start + 8]] == [
        ["0", "(owns", "its", "server)"],
        ["0"],
        ["0"],
        ["0"],
        ["1", "(owns", "its", "server)"],
        ["1"],
    ]
    assert "  engines            2 of 4:  {0, 2, 1, 3}, {4, 6, 5, 7}" in lines


def test_nodes_are_named_where_ranks_need_several_and_keep_engines_apart(make_config: MakeConfig) -> None:
    settings = ("parallel.tensor=4", "rollout.tensor=2")
    alone = report(make_config(), *settings, world_size=4, per_node=4)
    assert "  engines            2 of 2:  {0, 2}, {1, 3}" in alone
    assert "world   4 ranks (from --ranks) = TP 4 x PP 1 x DP 1, distributed optimizer" in alone
    apart = report(make_config(), *settings, world_size=4, per_node=2)
    assert "  engines            2 of 2:  0-1, 2-3" in apart
    assert "world   4 ranks (from --ranks) on nodes of 2 = TP 4 x PP 1 x DP 1, distributed optimizer" in apart


def test_interleaved_chunks_are_listed_per_stage(make_config: MakeConfig) -> None:
    lines = report(make_config(), "parallel={pipeline: 2, virtual_pipeline: 2}", world_size=2)
    assert any("embedding, layers 0 + 2" in line for line in lines)
    assert any("layers 1 + 3, output" in line for line in lines)


def test_many_ranks_are_collapsed_to_their_stages(make_config: MakeConfig, make_model: Any) -> None:
    make_model(num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=8)
    overrides = ("parallel={tensor: 8, pipeline: 4}", "rollout.tensor=2", "rollout.prompts_per_step=1024")
    lines = report(make_config(), *overrides, world_size=512)
    assert len(lines) < 50
    assert [line.split() for line in lines if "embedding, layers" in line] == [
        ["0", "0-127", "embedding,", "layers", "0-1"]
    ]
    assert "  engines            256 of 2:  {0, 4}, {1, 5}, ..., {507, 511}" in lines
    assert "  tensor parallel    64 of 8:   0-7, 8-15, ..., 504-511" in lines
    assert "  data parallel      32 of 16:  {0, 8, ..., 120}, {1, 9, ..., 121}, ..., {391, 399, ..., 511}" in lines


def test_batch_arithmetic_is_spelt_out(make_config: MakeConfig) -> None:
    lines = report(make_config(), "train.mini_batches=4", "train.epochs=2", "rollout.tensor=2", world_size=4)
    start = lines.index("each step")
    assert [line.split(maxsplit=1) for line in lines[start + 1 : start + 4]] == [
        ["samples", "16 prompts x 4 = 64"],
        ["per", "engine  about 32 samples, at most 256 at a time"],
        ["updates", "2 x 4 = 8, of 16 samples each"],
    ]
    assert lines[start + 4].strip() == "tokens      at most 896 (14 a sample), micro-batches of 16,384"
    assert lines[start + 5].strip() == "whole run   10 steps, 640 samples, 80 optimizer steps"


def test_only_the_models_of_the_run_are_named(make_config: MakeConfig) -> None:
    path = make_config()
    grpo = report(path, world_size=1)
    assert not any(line.strip().startswith(("critic ", "reference ")) for line in grpo)
    overrides = ("algorithm.advantage=gae", "critic.warmup_steps=3", "algorithm.kl={where: reward, coef: 0.05}")
    ppo = report(path, *overrides, world_size=1)
    assert any(line.startswith("  critic ") and line.endswith("lr 5e-06, alone for 3 steps") for line in ppo)
    assert "  reference  bf16, frozen" in ppo


def test_memory_shows_each_kind_of_stage_and_the_engine(make_config: MakeConfig) -> None:
    lines = report(make_config(), "parallel.pipeline=4", "rollout.max_total_tokens=1024", world_size=4)
    start = lines.index("memory of one rank, estimated (activations roughly)")
    assert [line.split()[0] for line in lines[start + 1 : start + 5]] == ["stage", "0", "1", "3"]
    assert lines[start + 5] == "  while it generates: engine weights 1.88 MiB, KV cache 1 MiB"


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [0],
}


def test_experts_are_named_with_their_groups_and_the_ranks_that_hold_them(
    make_config: MakeConfig, make_model: Any
) -> None:
    make_model(**MOE)
    overrides = ("parallel={tensor: 2, sequence: true, expert: 2, expert_tensor: 2}",)
    lines = report(make_config(), *overrides, world_size=8)
    assert any("MLP 512, 8 experts of 64 in 3 layers, 2 for a token, vocabulary 14" in line for line in lines)
    assert "experts 8 ranks = ETP 2 x EP 2 x PP 1 x expert DP 2" in lines
    start = lines.index("ranks")
    assert [line.split()[:7] for line in lines[start + 1 : start + 7]] == [
        ["rank", "tp", "dp", "pp", "etp", "ep", "edp"],
        ["0", "0", "0", "0", "0", "0", "0"],
        ["1", "1", "0", "0", "1", "0", "0"],
        ["2", "0", "1", "0", "0", "1", "0"],
        ["3", "1", "1", "0", "1", "1", "0"],
        ["4", "0", "2", "0", "0", "0", "1"],
    ]
    assert "layers 0-3, output, experts 0-3" in lines[start + 2] and "experts 4-7" in lines[start + 4]
    assert "  expert tensor      4 of 2:  0-1, 2-3, 4-5, 6-7" in lines
    assert "  expert parallel    4 of 2:  {0, 2}, {1, 3}, {4, 6}, {5, 7}" in lines
    assert "  expert data        4 of 2:  {0, 4}, {1, 5}, {2, 6}, {3, 7}" in lines


def test_engines_are_named_with_what_cuts_them(make_config: MakeConfig, make_model: Any) -> None:
    make_model(**MOE)
    for expert, named in ((1, "TP 2"), (2, "TP 2, EP 2")):
        lines = report(make_config(), "rollout.tensor=2", f"rollout.expert={expert}", world_size=2)
        assert f"  engine     bf16, SGLang, {named}" in lines


def test_routing_is_shown_of_a_model_with_experts_only(make_config: MakeConfig, make_model: Any) -> None:
    assert not any(line.startswith("  routing") for line in report(make_config(), world_size=1))
    make_model("experts", **MOE)
    lines = report(make_config({"model.path": str(make_config().parent / "experts")}), world_size=1)
    assert "  routing    router replay off, sequence-wise balance loss off" in lines


def test_stages_of_different_sizes_are_listed_with_their_layers_and_memory(
    make_config: MakeConfig, make_model: Any
) -> None:
    make_model(num_hidden_layers=7)
    lines = report(make_config(), "parallel={pipeline: 4, first_stage_layers: 2, last_stage_layers: 1}", world_size=4)
    start = lines.index("ranks")
    held = lines[start + 2 : start + 6]
    for line, layers in zip(held, ("layers 0-1", "layers 2-3", "layers 4-5", "layer 6, output"), strict=True):
        assert layers in line
    start = lines.index("memory of one rank, estimated (activations roughly)")
    assert [line.split()[0] for line in lines[start + 1 : start + 5]] == ["stage", "0", "1", "3"]


def test_a_latent_and_what_is_left_out_are_named(make_config: MakeConfig, make_model: Any) -> None:
    make_model(
        architectures=["DeepseekV3ForCausalLM"],
        head_dim=None,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        first_k_dense_replace=0,
        n_group=2,
        topk_group=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_nextn_predict_layers=1,
    )
    lines = report(make_config(), world_size=1)
    assert any(
        "4 heads of 24 over a latent of 40, 8 experts of 64 + 64 shared, 2 for a token" in line for line in lines
    )
    assert "        left out: 1 multi-token-prediction layer(s), which a policy does not use" in lines


def test_warnings_come_last(make_config: MakeConfig) -> None:
    assert report(make_config(), world_size=1, warnings=("a", "b"))[-3:] == ["warnings", "  a", "  b"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**30 * 80, "80 GiB"),
        (2**40 * 3, "3 TiB"),
        (1023 * 1024, "1023 KiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert in_units(size) == text


def test_many_groups_are_abbreviated() -> None:
    assert spans([[0, 1], [2, 3]]) == "0-1, 2-3"
    assert spans([[0, 2, 1, 3]]) == "{0, 2, 1, 3}"
    assert spans([[rank] for rank in range(512)]) == "0, 1, ..., 511"
    assert spans([list(range(0, 512, 8))]) == "{0, 8, ..., 504}"
