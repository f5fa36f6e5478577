"""A plan moves every element of an engine's parameters once, from a rank that holds it, and as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_checkpoint import NAMES, architecture, config

from rlmegatron.config.partition import engine_groups
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.replica import ReplicaLayout, stage_lookup
from rlmegatron.models.rules import Box, Rule, stages
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_parameters import EngineParameters
from rlmegatron.weight_sync.plan import Ints, Pieces, Wanted, plan_pieces
from rlmegatron.weight_sync.sources import TrainRanks, exchange_groups
from rlmegatron.weight_sync.traffic import least_bytes, model_bytes, traffic

LAYOUTS = st.builds(
    ReplicaLayout,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
)


@dataclass(frozen=True)
class Planned:
    """What every rank of an engine wants and gets, and the ranks that give."""

    rules: Sequence[Rule]
    wanted: list[list[Wanted]]
    pieces: list[Pieces]
    ranks: TrainRanks


def plan_of(
    arch: Architecture, layout: ReplicaLayout, tensor: int, *, on_cpu: bool, replicas: int = 1, per_node: int = 64
) -> Planned:
    every = [list(placements(arch, tp=tensor, rank=rank, on_cpu=on_cpu)) for rank in range(tensor)]
    wanted = [EngineParameters.expected(of_rank, "bfloat16").wanted(of_rank) for of_rank in every]
    stage_of = stage_lookup(stages(num_layers=arch.num_layers, pp=layout.pp))
    rules = arch.parameter_rules(layout.tp)
    pieces = [plan_pieces(rules, of_rank, layout, stage_of=stage_of) for of_rank in wanted]
    num_experts = arch.experts.num if arch.experts else 0
    return Planned(
        rules, wanted, pieces, TrainRanks(layout, replicas * layout.pp * layout.per_stage, per_node, num_experts)
    )


def inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def numbered(arch: Architecture) -> dict[str, Any]:
    """Every tensor, all of whose elements differ from each other."""
    parts = {part.name: part.shape for rule in arch.parameter_rules(1) for part in rule.parts}
    return {name: np.arange(np.prod(shape)).reshape(shape) + 1 for name, shape in parts.items()}


def parameters_of(arch: Architecture, layout: ReplicaLayout, tensors: dict[str, Any]) -> list[dict[str, Any]]:
    """Rank of a replica -> parameter -> what it holds of it."""
    stage_of = stage_lookup(stages(num_layers=arch.num_layers, pp=layout.pp))
    num_local = (arch.experts.num if arch.experts else 0) // layout.ep
    found: list[dict[str, Any]] = []
    for place in layout.places():
        found.append({})
        for rule in arch.parameter_rules(layout.tp):
            is_mine = rule.expert is None or rule.expert // num_local == place.ep_rank
            if rule.copy or not is_mine or stage_of(rule) != place.pp_rank:
                continue
            size, rank = layout.cut(rule, place)
            found[-1][rule.parameter] = local = np.zeros(rule.local_shape(size), dtype=int)
            for piece in rule.pieces(size=size, rank=rank):
                local[inside(piece.target)] = tensors[piece.name][inside(piece.source)]
    return found


def fits(arch: Architecture, layout: ReplicaLayout) -> bool:
    """Whether the model can be cut so at all."""
    try:
        for rule in arch.parameter_rules(layout.tp):
            size = layout.tp if rule.axis == "tp" else layout.etp
            list(rule.pieces(size=size, rank=0))
    except ValueError:
        return False
    return (arch.experts.num if arch.experts else 0) % layout.ep == 0 and arch.num_layers % layout.pp == 0


SIZES = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "vocab_size": st.integers(40, 90),
        "intermediate_size": st.sampled_from([40, 48, 64]),
        "num_hidden_layers": st.sampled_from([2, 4]),
        "tie_word_embeddings": st.booleans(),
    }
)
CASES = {
    "name": st.sampled_from(NAMES),
    "changes": SIZES,
    "layout": LAYOUTS,
    "replicas": st.sampled_from([1, 2, 3]),
    "per_node": st.sampled_from([2, 8, 64]),
    "tensor": st.sampled_from([1, 2, 3, 4, 8]),
    "on_cpu": st.booleans(),
    "on": st.integers(0, 63),
}


@settings(max_examples=100, deadline=None)
@given(**CASES)
def test_every_element_comes_once_from_a_rank_that_holds_it(**case: Any) -> None:
    check_cover(**case)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(**CASES)
def test_so_it_does_in_thousands_of_layouts(**case: Any) -> None:
    check_cover(**case)


def check_cover(
    *,
    name: str,
    changes: dict[str, Any],
    layout: ReplicaLayout,
    replicas: int,
    per_node: int,
    tensor: int,
    on_cpu: bool,
    on: int,
) -> None:
    """Elements are numbered from 1 and added up where they arrive: a second copy, or one elsewhere, would show."""
    latent = {"num_key_value_heads": config(name)["num_attention_heads"]} if "Deepseek" in name else {}
    arch = architecture(name, **{**changes, **latent})
    assume(fits(arch, layout) and (on_cpu or arch.num_heads % tensor == 0))
    assume(on_cpu or max(tensor, arch.num_kv_heads) % min(tensor, arch.num_kv_heads) == 0)
    tensors, rules = numbered(arch), arch.parameter_rules(layout.tp)
    ranks = parameters_of(arch, layout, tensors)
    plan = plan_of(arch, layout, tensor, on_cpu=on_cpu, replicas=replicas, per_node=per_node)
    for pieces, wanted in zip(plan.pieces, plan.wanted, strict=True):
        source_ranks = plan.ranks.source_ranks(pieces, on=on % plan.ranks.num_ranks)
        stage, place = np.divmod(source_ranks, plan.ranks.per_stage)
        found = written(pieces, stage * layout.per_stage + place % layout.per_stage, rules, ranks)
        assert sum(np.count_nonzero(content) for content in found.values()) == pieces.num_elements().sum()
        for one in wanted:
            (top, bottom), (left, right) = one.home if len(one.home) == 2 else ((0, 1), *one.home)
            expected = tensors[one.name][inside(one.source)]
            assert np.array_equal(found[one.parameter][top:bottom, left:right].reshape(expected.shape), expected), one


def written(pieces: Pieces, source_ranks: Ints, rules: Sequence[Rule], ranks: list[dict[str, Any]]) -> dict[int, Any]:
    """Parameter number -> its content as a matrix, by a slow loop over the pieces."""
    most = {
        number: (pieces.row + pieces.rows)[pieces.parameter == number].max()
        for number in set(pieces.parameter.tolist())
    }
    found: dict[int, Any] = {}
    columns = (getattr(pieces, field.name).tolist() for field in fields(pieces))
    for source, one in zip(source_ranks, zip(*columns, strict=True), strict=True):
        rule, _, _, _, top, left, source_width, parameter, row, column, width, rows, across = one
        given = ranks[source][rules[rule].parameter]
        matrix = given.reshape(-1, given.shape[-1])
        assert matrix.shape[1] == source_width
        if parameter not in found:
            found[parameter] = np.zeros((most[parameter], width), dtype=int)
        found[parameter][row : row + rows, column : column + across] += matrix[top : top + rows, left : left + across]
    return found


def dense() -> Architecture:
    """A model of which nothing is held twice but norms."""
    return architecture(
        "LlamaForCausalLM",
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=96,
        vocab_size=512,
        num_hidden_layers=4,
        tie_word_embeddings=False,
        head_dim=8,
    )


@pytest.mark.parametrize(("tp", "pp", "tensor"), [(8, 1, 2), (4, 1, 1), (2, 2, 2), (2, 2, 1), (8, 1, 8)])
def test_a_rank_receives_the_bound_and_not_a_byte_more(tp: int, pp: int, tensor: int) -> None:
    """By hand: a rank gets what an engine's rank holds, 1/tensor of the model, but for its own 1/(tp pp), and the norms
    of other stages."""
    arch, layout = dense(), ReplicaLayout(tp=tp, pp=pp)
    plan = plan_of(arch, layout, tensor, on_cpu=False)
    engines = engine_groups(world_size=tp * pp, tensor=tensor, train_tensor=tp)
    num_bytes = model_bytes(arch.parameter_rules(1), itemsize=2)
    found = traffic(plan.rules, plan.pieces, plan.ranks, engines, itemsize=2)
    cut = 2 * (2 * 512 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 96))
    layer, last = 2 * 2 * 64 * 4 // pp, 2 * 64
    assert num_bytes == cut + layer * pp + last
    assert found.bound == num_bytes // tensor - num_bytes // (tp * pp)  # an engine is no finer than a stage
    for rank, received in enumerate(found.received):
        stage = rank // tp
        norms = layer * pp + last - layer - (last if stage == pp - 1 else 0)
        outside = 2 * 512 * 64  # the embedding is held by the first stage, the head by the last
        own = (cut - 2 * outside) // (tp * pp) + (outside // tp) * ((stage == 0) + (stage == pp - 1))
        assert received == cut // tensor - own + norms
    if pp == 1:
        assert set(found.received) == {cut // tensor - cut // tp}
    assert sum(found.sent) == found.total


@pytest.mark.parametrize(
    ("layout", "tensor", "share"),
    [
        (ReplicaLayout(tp=8, pp=1), 2, 1 / 2 - 1 / 8),
        (ReplicaLayout(tp=2, pp=2), 1, 1 - 1 / 4),
        (ReplicaLayout(tp=1, pp=1), 2, 0),
        (ReplicaLayout(tp=2, pp=1), 4, 0),
        (ReplicaLayout(tp=1, pp=2), 2, 1 / 2 - 1 / 4),
    ],
)
def test_the_bound_by_hand(layout: ReplicaLayout, tensor: int, share: float) -> None:
    """The last: a rank has one stage of two, of which its engine rank serves half, and wants half of both."""
    assert least_bytes(8000, layout, engine_tensor=tensor) == 8000 * share


def test_everybody_gives_as_much() -> None:
    plan = plan_of(dense(), ReplicaLayout(tp=4, pp=1), 1, on_cpu=False, replicas=2)
    found = traffic(plan.rules, plan.pieces, plan.ranks, [(rank,) for rank in range(8)], itemsize=2)
    assert len(set(found.sent)) == len(set(found.received)) == 1 and {len(some) for some in found.source_ranks} == {4}


def test_of_equal_copies_the_own_one_gives_and_the_own_rank_what_all_hold() -> None:
    """Four ranks hold two copies of what tensor parallelism cuts in two, and one of the experts."""
    arch = architecture("Qwen3MoeForCausalLM", num_experts=4)
    plan = plan_of(arch, ReplicaLayout(tp=2, pp=1, ep=4), 2, on_cpu=False)
    pieces = plan.pieces[1]
    for shard, expert, source in zip(pieces.shard, pieces.expert, plan.ranks.source_ranks(pieces, on=3), strict=True):
        if expert >= 0:
            assert source == expert
        else:
            assert source == (3 if shard < 0 else 2 + shard)


def test_a_copy_on_the_own_node_is_nearer_than_one_of_the_own_replica() -> None:
    """TP 4 on nodes of 2: ranks 0 to 3 and 4 to 7 hold a copy each, and rank 1 has shard 0 and 1 on its node."""
    plan = plan_of(dense(), ReplicaLayout(tp=2, pp=2), 1, on_cpu=False, replicas=2, per_node=2)
    sources = plan.ranks.source_ranks(plan.pieces[0], on=3)  # of stage 0, replica 1, on the node of ranks 2 and 3
    assert set(sources) == {2, 3, 6, 7}  # its own place of stage 1 is on the node of ranks 6 and 7


@pytest.mark.parametrize(
    ("tp", "tensor", "replicas", "groups"),
    [
        (8, 2, 1, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, 1, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, 4, 2, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_ranks_exchange_within_the_micro_data_parallel_groups(
    tp: int, tensor: int, replicas: int, groups: list[tuple[int, ...]]
) -> None:
    """Those of HybridFlow, where sizes divide each other."""
    plan = plan_of(dense(), ReplicaLayout(tp=tp, pp=1), tensor, on_cpu=False, replicas=replicas)
    needed: list[list[int]] = [[] for _ in range(plan.ranks.num_ranks)]
    for engine in engine_groups(world_size=plan.ranks.num_ranks, tensor=tensor, train_tensor=tp):
        for engine_rank, rank in enumerate(engine):
            needed[rank] = plan.ranks.source_ranks(plan.pieces[engine_rank], on=rank).tolist()
    assert exchange_groups(needed) == groups
