"""The mapping between Megatron parameters and Hugging Face tensors, as boxes, against slow obvious constructions."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import tiny_architecture

from rlmegatron.models.rules import Box, Part, Piece, Rule, Stage, on_stage, stages


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@st.composite
def fused_rules(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """(blocks, rows of a block that each part has, ranks); the ranks divide all rows."""
    blocks, rows = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    total = blocks * sum(rows)
    return blocks, rows, draw(st.sampled_from([size for size in range(1, total + 1) if total % size == 0]))


@settings(deadline=None, max_examples=200)
@given(fused_rules(), st.sampled_from([0, 1]))
def test_ranks_hold_even_windows_of_the_whole_fused_tensor(case: tuple[int, list[int], int], dim: int) -> None:
    """Build the fused tensor group by group, cut it evenly: that is what Megatron does when KV heads are too few."""
    blocks, rows, size = case
    numbers = iter(range(10_000))
    parts = [np.array([[next(numbers)] * 2 for _ in range(blocks * number)]) for number in rows]
    groups = [
        part[group * number : (group + 1) * number]
        for group in range(blocks)
        for part, number in zip(parts, rows, strict=True)
    ]
    parts, whole = [np.moveaxis(part, 0, dim) for part in parts], np.moveaxis(np.concatenate(groups), 0, dim)
    names = tuple("qkv"[: len(rows)])
    shaped = zip(names, parts, strict=True)
    rule = Rule("fused", tuple(Part(name, part.shape) for name, part in shaped), dim=dim, blocks=blocks)
    for rank, expected in enumerate(np.split(whole, size, axis=dim)):
        found = np.full(rule.local_shape(size), -1)
        for piece in rule.pieces(size=size, rank=rank):
            found[index(piece.target)] = parts[names.index(piece.name)][index(piece.source)]
        assert (found == expected).all()


def test_fused_qkv_interleaves_query_groups() -> None:
    """Two groups of two query heads of size 1: Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1."""
    rule = Rule("qkv", (Part("q", (4,)), Part("k", (2,)), Part("v", (2,))), dim=0, blocks=2)
    pieces = list(rule.pieces(size=1, rank=0))
    assert [(piece.name, piece.source[0], piece.target[0]) for piece in pieces] == [
        ("q", (0, 2), (0, 2)),
        ("k", (0, 1), (2, 3)),
        ("v", (0, 1), (3, 4)),
        ("q", (2, 4), (4, 6)),
        ("k", (1, 2), (6, 7)),
        ("v", (1, 2), (7, 8)),
    ]
    assert list(rule.pieces(size=2, rank=1)) == [
        Piece("q", ((2, 4),), ((0, 2),)),
        Piece("k", ((1, 2),), ((2, 3),)),
        Piece("v", ((1, 2),), ((3, 4),)),
    ]


def test_two_query_groups_on_four_ranks_share_each_group_between_two() -> None:
    """The same rows, two a rank: q0 q1 | k0 v0 | q2 q3 | k1 v1."""
    rule = Rule("qkv", (Part("q", (4,)), Part("k", (2,)), Part("v", (2,))), dim=0, blocks=2)
    assert [[(piece.name, piece.source[0]) for piece in rule.pieces(size=4, rank=rank)] for rank in range(4)] == [
        [("q", (0, 2))],
        [("k", (0, 1)), ("v", (0, 1))],
        [("q", (2, 4))],
        [("k", (1, 2)), ("v", (1, 2))],
    ]


def test_gated_mlp_has_gate_and_up_on_every_rank() -> None:
    rule = Rule("fc1", (Part("gate", (4, 1)), Part("up", (4, 1))), dim=0)
    assert [piece.name for piece in rule.pieces(size=1, rank=0)] == ["gate", "up"]
    assert list(rule.pieces(size=2, rank=1)) == [
        Piece("gate", ((2, 4), (0, 1)), ((0, 2), (0, 1))),
        Piece("up", ((2, 4), (0, 1)), ((2, 4), (0, 1))),
    ]


def test_padded_vocabulary_leaves_the_last_rank_what_remains() -> None:
    """5 rows padded to 16 over two ranks of 8: rank 0 holds all, rank 1 only padding."""
    rule = Rule("embedding", (Part("embed", (5, 3)),), dim=0, padded=16)
    assert list(rule.pieces(size=2, rank=0)) == [Piece("embed", ((0, 5), (0, 3)), ((0, 5), (0, 3)))]
    assert list(rule.pieces(size=2, rank=1)) == []
    assert rule.local_shape(2) == (8, 3)


@pytest.mark.parametrize(
    ("rule", "size", "message"),
    [
        (Rule("qkv", (Part("q", (4,)), Part("k", (2,))), dim=0, blocks=2), 4, "qkv: 6 rows in 2 blocks .* 4 ranks"),
        (Rule("fc1", (Part("gate", (3,)), Part("up", (3,))), dim=0), 2, "fc1: 6 rows in 2 blocks .* over 2 ranks"),
        (Rule("fc2", (Part("down", (8, 3)),), dim=1), 2, "fc2: 3 rows in 2 blocks .* over 2 ranks"),
    ],
)
def test_what_does_not_come_out_even_is_refused(rule: Rule, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(rule.pieces(size=size, rank=0))


def test_interleaved_chunks_alternate_between_stages() -> None:
    """8 layers, PP 2, VPP 2: rank 0 holds 0 1 and 4 5, rank 1 holds 2 3 and 6 7."""
    assert stages(num_layers=8, pp=2, vpp=2) == {
        (0, 0): Stage((0, 1), True, False),
        (1, 0): Stage((2, 3), False, False),
        (0, 1): Stage((4, 5), False, False),
        (1, 1): Stage((6, 7), False, True),
    }


def test_the_first_and_the_last_stage_may_differ() -> None:
    assert [stage.layers for stage in stages(num_layers=7, pp=4, first=1, last=2).values()] == [
        (0,),
        (1, 2),
        (3, 4),
        (5, 6),
    ]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_lives_on_one_stage(pp: int, vpp: int, tied: bool) -> None:
    """Only the output layer of tied embeddings is a second home, and on a single stage there is none."""
    arch = tiny_architecture("Qwen3ForCausalLM", tie_word_embeddings=tied)
    rules = arch.parameter_rules(1)
    homes = Counter(
        rule.parameter
        for stage in stages(num_layers=arch.num_layers, pp=pp, vpp=vpp).values()
        for _, _, rule in on_stage(rules, stage)
    )
    expected = {rule.parameter for rule in rules if not (rule.copy and pp == 1)}
    assert homes == Counter(expected)


def test_layers_are_renumbered_on_their_stage() -> None:
    rules = tiny_architecture("Qwen3ForCausalLM").parameter_rules(1)
    found = {
        rule.parameter: (name, fused)
        for name, fused, rule in on_stage(rules, Stage((2, 3), is_first=False, is_last=False))
    }
    assert found["decoder.layers.3.mlp.linear_fc2.weight"] == ("decoder.layers.1.mlp.linear_fc2.weight", None)
    assert found["decoder.layers.2.pre_mlp_layernorm.weight"] == (
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    )
    assert all(name.startswith(("decoder.layers.2.", "decoder.layers.3.")) for name in found)


def test_experts_are_renumbered_on_their_rank() -> None:
    """Rank 1 of two holds experts 4 to 7 of 8 as its own 0 to 3, in a list or in a grouped linear."""
    rules = tiny_architecture("Qwen3MoeForCausalLM").parameter_rules(1)
    stage = Stage((2, 3), is_first=False, is_last=True)
    found = {rule.parameter: (name, fused) for name, fused, rule in on_stage(rules, stage, range(4, 8))}
    assert found["decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight"] == (
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight1",
    )
    experts = {rule.expert for _, _, rule in on_stage(rules, stage, range(4, 8)) if rule.expert is not None}
    assert experts == {4, 5, 6, 7}


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(13, 1, 16), (16, 2, 16), (17, 2, 32), (151936, 8, 151936)])
def test_vocabulary_is_padded_to_eight_rows_a_rank(vocab: int, tp: int, padded: int) -> None:
    assert tiny_architecture("Qwen3ForCausalLM", vocab_size=vocab).padded_vocab(tp) == padded


def count(family: str, **changes: Any) -> int:
    rules = tiny_architecture(family, **changes).parameter_rules(1)
    return sum(prod(part.shape) for rule in rules if not rule.copy for part in rule.parts)


def test_number_of_parameters_is_that_of_the_checkpoint() -> None:
    """Counted by hand for one layer of hidden 8, 4 heads of 6, 2 KV heads, FFN 12, vocabulary 13, Qwen3, untied."""
    attention = 24 * 8 + 2 * 12 * 8 + 8 * 24 + 2 * 6
    assert count("Qwen3ForCausalLM", num_hidden_layers=1) == 2 * 13 * 8 + attention + 3 * 12 * 8 + 2 * 8 + 8


def test_number_of_parameters_of_latent_attention_with_experts() -> None:
    """By hand for one layer: queries 4 x (3 + 2) from rank 3, keys and values 4 x (3 + 4) from rank 5, 8 experts of 8,
    shared ones of 16, and the bias of the router."""
    queries, keys_values = 8 * 3 + 3 + 3 * 20, 8 * (5 + 2) + 5 + 5 * 28
    experts = 3 * 8 * (8 * 8 + 16) + 8 * 8 + 8
    expected = 2 * 13 * 8 + queries + keys_values + 16 * 8 + experts + 2 * 8 + 8
    assert count("DeepseekV3ForCausalLM", num_hidden_layers=1, first_k_dense_replace=0) == expected
