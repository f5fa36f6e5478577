"""How the fewest ranks that hold a whole model share it: what each is the first to hold, and who cuts what.

In: parallel sizes. Out: places, in Megatron's rank order. Pure; must never import torch or megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlmegatron.config.partition import ranks_per_stage
from rlmegatron.models.rules import Rule, Stage


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank of a replica stands, and which kinds of parameters it is the first to hold there."""

    pp_rank: int
    tp_rank: int
    ep_rank: int
    etp_rank: int
    sends_dense: bool
    sends_experts: bool


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """The fewest ranks that hold a whole model: of every stage lcm(tp, etp * ep) consecutive ones.

    Megatron's rank order inside a stage is tp fastest for dense parameters, and etp, then ep for experts.
    """

    tp: int
    pp: int
    ep: int = 1
    etp: int = 1

    @property
    def per_stage(self) -> int:
        """Ranks of one stage."""
        return ranks_per_stage(tensor=self.tp, expert=self.ep, expert_tensor=self.etp)

    def replicas(self, num_ranks: int) -> list[tuple[int, ...]]:
        """The ranks of every replica of a run, in the order of `places`; stages are the slowest axis of all.

        >>> ReplicaLayout(tp=2, pp=2).replicas(8)
        [(0, 1, 4, 5), (2, 3, 6, 7)]
        """
        block, stage_ranks = self.per_stage, num_ranks // self.pp
        assert num_ranks % (block * self.pp) == 0, f"{num_ranks} ranks do not hold whole models"
        return [
            tuple(stage * stage_ranks + first + rank for stage in range(self.pp) for rank in range(block))
            for first in range(0, stage_ranks, block)
        ]

    def places(self) -> list[Place]:
        """The place of every rank of the replica, in the order of the group."""
        return [self._place(stage, rank) for stage in range(self.pp) for rank in range(self.per_stage)]

    def _place(self, stage: int, rank: int) -> Place:
        return Place(
            pp_rank=stage,
            tp_rank=rank % self.tp,
            ep_rank=rank // self.etp % self.ep,
            etp_rank=rank % self.etp,
            sends_dense=rank < self.tp,
            sends_experts=rank < self.etp * self.ep,
        )

    def cut(self, rule: Rule, place: Place) -> tuple[int, int]:
        """(size, rank) of the axis that cuts `rule`."""
        return (self.tp, place.tp_rank) if rule.axis == "tp" else (self.etp, place.etp_rank)


def stage_lookup(cut: Mapping[tuple[int, int], Stage]) -> Callable[[Rule], int]:
    """Rule -> the pipeline rank that holds it."""
    by_layer = {layer: rank for (rank, _), stage in cut.items() for layer in stage.layers}
    last = max(rank for rank, _ in cut)

    def stage_of(rule: Rule) -> int:
        if rule.layer is not None:
            return by_layer[rule.layer]
        return 0 if rule.path.startswith("embedding.") else last

    return stage_of
