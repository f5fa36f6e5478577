"""A plan moves every element of an engine's parameters once, from a rank that holds it, and as little as possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_checkpoint import NAMES, architecture

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.replica import ReplicaLayout, stage_lookup
from rlmegatron.models.rules import Box, stages
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.plan import Plan, make_plan
from rlmegatron.weight_sync.traffic import strided_engines, traffic

LAYOUTS = st.builds(
    ReplicaLayout,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
)


def plan_of(arch: Architecture, layout: ReplicaLayout, tensor: int, *, on_cpu: bool) -> Plan:
    wanted = [
        [box for box in placements(arch, tp=tensor, rank=rank, on_cpu=on_cpu) if not box.is_derived]
        for rank in range(tensor)
    ]
    cut = stages(num_layers=arch.num_layers, pp=layout.pp)
    return make_plan(arch.parameter_rules(layout.tp), wanted, layout, stage_of=stage_lookup(cut))


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


def corner(box: Box, spans: Any, onto: Box) -> tuple[slice, ...]:
    """Where `spans`, a part of `box`, lies when `box` is laid onto another one."""
    shifted = zip(spans, box, onto, strict=True)
    return tuple(slice(low - start[0] + to[0], high - start[0] + to[0]) for (low, high), start, to in shifted)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    layout=LAYOUTS,
    tensor=st.sampled_from([1, 2, 4]),
    on_cpu=st.booleans(),
    on=st.integers(0, 63),
)
def test_every_element_comes_once_from_a_rank_that_holds_it(
    name: str, layout: ReplicaLayout, tensor: int, on_cpu: bool, on: int
) -> None:
    arch = architecture(name)
    assume(fits(arch, layout))
    tensors = numbered(arch)
    ranks, on = parameters_of(arch, layout, tensors), on % (layout.pp * layout.per_stage)
    plan = plan_of(arch, layout, tensor, on_cpu=on_cpu)
    for engine_rank, (pieces, wanted) in enumerate(zip(plan.pieces, plan.wanted, strict=True)):
        written = [np.zeros([stop - start for start, stop in one.source], dtype=int) for one in wanted]
        sources = plan.sources(engine_rank, on=on)
        for row, want, box, source in zip(pieces.held, pieces.wanted, pieces.boxes, sources, strict=True):
            held, origin = plan.held[row], wanted[want].source
            spans = box if len(origin) == 2 else box[1:]
            given_up = ranks[source][plan.rules[held.rule].parameter][corner(held.source, spans, held.target)]
            written[want][corner(origin, spans, tuple((0, 0) for _ in origin))] += given_up
        for one, found in zip(wanted, written, strict=True):
            assert np.array_equal(found, tensors[one.name][inside(one.source)]), one


@pytest.mark.parametrize(
    ("layout", "tensor", "engines"),
    [
        (ReplicaLayout(tp=8, pp=1), 2, ((0, 4), (1, 5), (2, 6), (3, 7))),
        (ReplicaLayout(tp=2, pp=2), 1, ((0,), (1,), (2,), (3,))),
        (ReplicaLayout(tp=4, pp=1, ep=8), 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
        (ReplicaLayout(tp=2, pp=2), 4, ((0, 1, 2, 3),)),
    ],
)
def test_engines_lie_where_a_rank_s_own_shard_is_of_use(
    layout: ReplicaLayout, tensor: int, engines: tuple[tuple[int, ...], ...]
) -> None:
    assert strided_engines(layout, tensor) == engines


@pytest.mark.parametrize(("tp", "pp", "tensor"), [(8, 1, 2), (4, 1, 1), (2, 2, 2), (2, 2, 1), (8, 1, 8)])
def test_a_rank_receives_the_bound_and_not_a_byte_more(tp: int, pp: int, tensor: int) -> None:
    """On a model of which nothing is held twice but norms, by every rank of a stage: those a stage gives to the others.

    The bound by hand: a rank gets what an engine's rank holds, 1/tensor of the model, but for its own 1/(tp pp).
    """
    arch = architecture(
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
    layout = ReplicaLayout(tp=tp, pp=pp)
    plan = plan_of(arch, layout, tensor, on_cpu=False)
    found = traffic(plan, strided_engines(layout, tensor), itemsize=2)
    cut = 2 * (2 * 512 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 96))
    layer, last = 2 * 2 * 64 * 4 // pp, 2 * 64
    for rank, received in enumerate(found.received):
        stage = rank // tp
        norms = layer * pp + last - layer - (last if stage == pp - 1 else 0)
        outside = 2 * 512 * 64  # the embedding is held by the first stage, the head by the last
        own = (cut - 2 * outside) // (tp * pp) + (outside // tp) * ((stage == 0) + (stage == pp - 1))
        assert received == cut // tensor - own + norms
    if pp == 1:
        assert set(found.received) == {cut // tensor - cut // tp}
    assert sum(found.sent) == found.total


def test_of_equal_copies_the_own_one_gives_and_the_own_rank_what_all_hold() -> None:
    """Four ranks hold two copies of what tensor parallelism cuts in two, and one of the experts."""
    arch = architecture("Qwen3MoeForCausalLM", num_experts=4)
    plan = plan_of(arch, ReplicaLayout(tp=2, pp=1, ep=4), 2, on_cpu=False)
    for row, source in zip(plan.pieces[1].held, plan.sources(1, on=3), strict=True):
        held = plan.held[row]
        expert = plan.rules[held.rule].expert
        if expert is not None:
            assert source == expert
        else:
            assert source == (3 if held.shard is None else 2 + held.shard), held
