"""How a replica's ranks share a model: nothing is missing, nothing is there twice, and ranks are Megatron's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_families import FAMILIES, tiny_architecture

import rlmegatron.learner.groups  # noqa: F401 - before megatron, which it makes importable
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.replica import Place, ReplicaLayout, stage_lookup
from rlmegatron.models.rules import Box, Rule, Stage, on_stage, stages
from rlmegatron.models.stream import TensorStream

Cut = tuple[ReplicaLayout, dict[str, int]]
"""A layout, and what else `stages` takes."""
CUTS: list[Cut] = [
    (ReplicaLayout(tp=1, pp=1), {}),
    (ReplicaLayout(tp=2, pp=1), {}),
    (ReplicaLayout(tp=4, pp=1, etp=4), {}),
    (ReplicaLayout(tp=4, pp=1, ep=4), {}),
    (ReplicaLayout(tp=4, pp=1, ep=2, etp=2), {}),
    (ReplicaLayout(tp=1, pp=1, ep=4), {}),
    (ReplicaLayout(tp=1, pp=1, ep=2, etp=2), {}),
    (ReplicaLayout(tp=2, pp=1, ep=4, etp=2), {}),
    (ReplicaLayout(tp=4, pp=1, ep=2), {}),
    (ReplicaLayout(tp=2, pp=2, ep=2), {"vpp": 2}),
    (ReplicaLayout(tp=1, pp=2, etp=2), {"vpp": 2}),
    (ReplicaLayout(tp=2, pp=4, ep=8), {}),
    (ReplicaLayout(tp=4, pp=2, ep=2), {"first": 1}),
    (ReplicaLayout(tp=1, pp=3, ep=2, etp=4), {"first": 1, "last": 1}),
    (ReplicaLayout(tp=2, pp=3), {"last": 2}),
]


def name_of(cut: Any) -> str:
    layout, stage = cut
    sizes = {"tp": layout.tp, "etp": layout.etp, "ep": layout.ep, "pp": layout.pp, **stage}
    return "-".join(f"{key}{size}" for key, size in sizes.items() if size > 1 or key in stage) or "whole"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", CUTS, ids=name_of)
def test_a_replica_fills_and_sends_every_element_once(family: str, cut: Cut) -> None:
    """Ranks fill every element of what they hold once, but padding; of the checkpoint's, one rank sends each once."""
    layout, sizes = cut
    arch = tiny_architecture(family)
    held, rules = stages(num_layers=arch.num_layers, pp=layout.pp, **sizes), arch.parameter_rules(layout.tp)
    num_experts = arch.experts.num if arch.experts else 0
    stream = TensorStream(rules, {}, stage_lookup(held), layout, group=None, num_experts=num_experts)  # type: ignore[arg-type]
    sent = {part.name: np.zeros(part.shape, dtype=int) for rule in rules for part in rule.parts}
    for place in layout.places():
        here = dict(held_by(place, layout, arch, held))
        for rule in here.values():
            is_sent = stream.sends(place, rule) and not rule.copy
            count_pieces(rule, layout.cut(rule, place), sent if is_sent else None)
        to_send = {rule.parameter for rule in rules if stream.sends(place, rule) and not rule.copy}
        assert to_send <= {rule.parameter for rule in here.values()}
    assert {name for name, count in sent.items() if (count != 1).any()} == set()


def held_by(
    place: Place, layout: ReplicaLayout, arch: Architecture, held: dict[tuple[int, int], Stage]
) -> Iterator[tuple[tuple[int, str], Rule]]:
    """((chunk, local name), rule) of everything that one rank holds; no name comes twice."""
    experts, seen = None, set()
    if arch.experts:
        num_local = arch.experts.num // layout.ep
        experts = range(place.ep_rank * num_local, (place.ep_rank + 1) * num_local)
    for (rank, chunk), stage in held.items():
        if rank == place.pp_rank:
            for name, fused, rule in on_stage(arch.parameter_rules(layout.tp), stage, experts):
                for local in {name, fused or name}:
                    assert (chunk, local) not in seen
                    seen.add((chunk, local))
                yield (chunk, name), rule


def count_pieces(rule: Rule, cut: tuple[int, int], sent: dict[str, Any] | None) -> None:
    size, rank = cut
    local = np.zeros(rule.local_shape(size), dtype=int)
    for piece in rule.pieces(size=size, rank=rank):
        local[index(piece.target)] += 1
        if sent is not None:
            assert sent[piece.name][index(piece.source)].shape == local[index(piece.target)].shape
            sent[piece.name][index(piece.source)] += 1
    rows = np.arange(len(local)) + rank * len(local)
    is_padding = rows >= rule.parts[0].shape[0] if rule.padded else np.zeros(len(local), dtype=bool)
    assert (local[is_padding] == 0).all() and (local[~is_padding] == 1).all(), f"{rule.parameter} at {cut}"


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def test_these_cuts_split_a_head_between_ranks() -> None:
    """One query group of 4 query heads, one key and one value head of 6 rows each, on 4 ranks: 9 rows a rank."""
    rule = next(rule for rule in tiny_architecture("MistralForCausalLM").parameter_rules(4) if rule.blocks == 1)
    pieces = [list(rule.pieces(size=4, rank=rank)) for rank in range(4)]
    assert [[(piece.name.split(".")[-2], piece.source[0]) for piece in of_rank] for of_rank in pieces] == [
        [("q_proj", (0, 9))],
        [("q_proj", (9, 18))],
        [("q_proj", (18, 24)), ("k_proj", (0, 3))],
        [("k_proj", (3, 6)), ("v_proj", (0, 6))],
    ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("layout", [layout for layout, _ in CUTS if layout.per_stage > 1], ids=str)
def test_places_are_those_of_megatrons_rank_order(layout: ReplicaLayout, num_replicas: int) -> None:
    """Megatron's own generators say, for every rank of several replicas, which index it has in its groups."""
    from megatron.core import parallel_state

    order = inspect.signature(parallel_state.initialize_model_parallel).parameters["order"].default
    per_stage = num_replicas * layout.per_stage
    common = {"pp": layout.pp, "cp": 1, "order": order}
    dense = parallel_state.RankGenerator(tp=layout.tp, ep=1, dp=per_stage // layout.tp, **common)
    experts = parallel_state.RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=per_stage // (layout.etp * layout.ep), **common
    )
    found = zip(
        index_in_group(dense.get_ranks("pp")),
        index_in_group(dense.get_ranks("tp")),
        index_in_group(experts.get_ranks("ep")),
        index_in_group(experts.get_ranks("tp")),
        strict=True,
    )
    of_rank = list(found)
    assert len(of_rank) == per_stage * layout.pp
    for replica in range(num_replicas):
        members = [
            stage * per_stage + replica * layout.per_stage + rank
            for stage in range(layout.pp)
            for rank in range(layout.per_stage)
        ]
        expected = [(place.pp_rank, place.tp_rank, place.ep_rank, place.etp_rank) for place in layout.places()]
        assert [of_rank[member] for member in members] == expected


def index_in_group(groups: list[list[int]]) -> list[int]:
    """Global rank -> its place in the one group that it is in."""
    found = {rank: place for group in groups for place, rank in enumerate(group)}
    assert len(found) == sum(len(group) for group in groups)
    return [found[rank] for rank in sorted(found)]
