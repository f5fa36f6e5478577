"""The mapping between Megatron parameters and Hugging Face tensors, as boxes."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Part, Piece, Rule, Stage, on_stage, stages
from rlmegatron.models.table import FAMILIES


@st.composite
def architectures(draw: st.DrawFn) -> tuple[Architecture, int]:
    """An architecture and a tensor-parallel size that it can be cut for."""
    tp = draw(st.sampled_from([1, 2, 4]))
    groups = tp * draw(st.integers(1, 2))
    name = draw(st.sampled_from(sorted(FAMILIES)))
    config: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": draw(st.integers(1, 70)),
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": tp * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_key_value_heads": groups,
        "head_dim": draw(st.integers(1, 3)),
        "max_position_embeddings": 8,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": draw(st.booleans()),
    }
    return FAMILIES[name](config), tp


def index(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@settings(deadline=None)
@given(architectures())
def test_ranks_cover_every_element_exactly_once(case: tuple[Architecture, int]) -> None:
    """A replicated parameter covers its tensor on every rank; only padding rows of a parameter stay uncovered."""
    arch, tp = case
    seen: dict[tuple[str, bool], Any] = {}
    for rule in arch.parameter_rules(tp):
        for part in rule.parts:
            seen[part.name, rule.copy] = np.zeros(part.shape, dtype=int)
        for rank in range(tp):
            local = np.zeros(rule.local_shape(tp), dtype=int)
            for piece in rule.pieces(tp=tp, rank=rank):
                target = local[index(piece.target)]
                assert target.shape == seen[piece.name, rule.copy][index(piece.source)].shape
                target += 1
                if rule.dim is not None or rank == 0:
                    seen[piece.name, rule.copy][index(piece.source)] += 1
            rows = np.arange(len(local)) + rank * len(local)
            is_padding = rows >= arch.vocab_size if rule.padded else np.zeros(len(local), dtype=bool)
            assert (local[is_padding] == 0).all() and (local[~is_padding] == 1).all()
    assert all((count == 1).all() for count in seen.values())


def test_fused_qkv_interleaves_query_groups() -> None:
    """Two groups of two query heads of size 1: Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1."""
    rule = Rule("qkv", (Part("q", (4,)), Part("k", (2,)), Part("v", (2,))), dim=0, blocks=2)
    pieces = list(rule.pieces(tp=1, rank=0))
    assert [(piece.name, piece.source[0], piece.target[0]) for piece in pieces] == [
        ("q", (0, 2), (0, 2)),
        ("k", (0, 1), (2, 3)),
        ("v", (0, 1), (3, 4)),
        ("q", (2, 4), (4, 6)),
        ("k", (1, 2), (6, 7)),
        ("v", (1, 2), (7, 8)),
    ]
    assert list(rule.pieces(tp=2, rank=1)) == [
        Piece("q", ((2, 4),), ((0, 2),)),
        Piece("k", ((1, 2),), ((2, 3),)),
        Piece("v", ((1, 2),), ((3, 4),)),
    ]


def test_padded_vocabulary_leaves_the_last_rank_what_remains() -> None:
    """5 rows padded to 16 over two ranks of 8: rank 0 holds all, rank 1 only padding."""
    rule = Rule("embedding", (Part("embed", (5, 3)),), dim=0, padded=16)
    assert list(rule.pieces(tp=2, rank=0)) == [Piece("embed", ((0, 5), (0, 3)), ((0, 5), (0, 3)))]
    assert list(rule.pieces(tp=2, rank=1)) == []
    assert rule.local_shape(2) == (8, 3)


def test_too_few_query_groups_are_refused() -> None:
    rule = Rule("qkv", (Part("q", (4,)), Part("k", (2,)), Part("v", (2,))), dim=0, blocks=2)
    with pytest.raises(ValueError, match="qkv: 2 blocks cannot be cut for tensor-parallel size 4"):
        list(rule.pieces(tp=4, rank=0))


def test_interleaved_chunks_alternate_between_stages() -> None:
    """8 layers, PP 2, VPP 2: rank 0 holds 0 1 and 4 5, rank 1 holds 2 3 and 6 7."""
    assert stages(num_layers=8, pp=2, vpp=2) == {
        (0, 0): Stage((0, 1), True, False),
        (1, 0): Stage((2, 3), False, False),
        (0, 1): Stage((4, 5), False, False),
        (1, 1): Stage((6, 7), False, True),
    }


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_lives_on_one_stage(make_architecture: Any, pp: int, vpp: int, tied: bool) -> None:
    """Only the output layer of tied embeddings is a second home, and on a single stage there is none."""
    arch = make_architecture(tie_word_embeddings=tied)
    rules = arch.parameter_rules(1)
    homes = Counter(
        rule.parameter
        for stage in stages(num_layers=arch.num_layers, pp=pp, vpp=vpp).values()
        for _, _, rule in on_stage(rules, stage)
    )
    expected = {rule.parameter for rule in rules if not (rule.copy and pp == 1)}
    assert homes == Counter(expected)


def test_layers_are_renumbered_on_their_stage(make_architecture: Any) -> None:
    rules = make_architecture().parameter_rules(1)
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


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(13, 1, 16), (16, 2, 16), (17, 2, 32), (151936, 8, 151936)])
def test_vocabulary_is_padded_to_eight_rows_a_rank(make_architecture: Any, vocab: int, tp: int, padded: int) -> None:
    assert make_architecture(vocab_size=vocab).padded_vocab(tp) == padded


def test_number_of_parameters_is_that_of_the_checkpoint(make_architecture: Any) -> None:
    """Counted by hand for one layer of hidden 8, 4 heads of 6, 2 KV heads, FFN 12, vocabulary 13, Qwen3, untied."""
    arch = make_architecture(num_hidden_layers=1)
    count = sum(prod(part.shape) for rule in arch.parameter_rules(1) for part in rule.parts)
    attention = 24 * 8 + 2 * 12 * 8 + 8 * 24 + 2 * 6
    assert count == 2 * 13 * 8 + attention + 3 * 12 * 8 + 2 * 8 + 8
