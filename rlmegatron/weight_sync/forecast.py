"""What a reshard will move, before there is a rank or an engine: every engine rank planned in turn.

In: an architecture and the sizes of a layout. Out: a `Forecast`. Pure; must never import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.replica import ReplicaLayout, stage_lookup
from rlmegatron.models.rules import Stage
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_parameters import EngineParameters
from rlmegatron.weight_sync.plan import Pieces, plan_pieces
from rlmegatron.weight_sync.sources import TrainRanks
from rlmegatron.weight_sync.traffic import Traffic, model_bytes, traffic


@dataclass(frozen=True, slots=True)
class Forecast:
    """`num_bytes` of the model, what moves, and the pieces of each engine rank."""

    num_bytes: int
    traffic: Traffic
    num_pieces: tuple[int, ...]


def forecast(
    arch: Architecture,
    layout: ReplicaLayout,
    cut: Mapping[tuple[int, int], Stage],
    engines: Sequence[Sequence[int]],
    *,
    engine_expert: int,
    num_ranks: int,
    ranks_per_node: int,
    itemsize: int,
    planned: Callable[[], None] = lambda: None,
) -> Forecast:
    """`cut` are the pipeline's stages, `engines` the ranks of each; `planned` is called after each engine rank."""
    rules, stage_of, tensor = arch.parameter_rules(layout.tp), stage_lookup(cut), len(engines[0])
    ranks = TrainRanks(layout, num_ranks, ranks_per_node, arch.experts.num if arch.experts else 0)
    pieces: list[Pieces] = []
    for rank in range(tensor):
        wanted = list(placements(arch, tp=tensor, ep=engine_expert, rank=rank, on_cpu=False))
        boxes = EngineParameters.expected(wanted, "bfloat16").wanted(wanted)
        pieces.append(plan_pieces(rules, boxes, layout, stage_of=stage_of))
        planned()
    moved = traffic(rules, pieces, ranks, engines, itemsize=itemsize)
    return Forecast(model_bytes(rules, itemsize=itemsize), moved, tuple(len(part) for part in pieces))
