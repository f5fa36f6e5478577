"""Which training rank gives each piece, where several hold it: the rank itself, then its neighbours.

In: `Pieces` and the ranks of a run. Out: a rank for each piece. Pure; must never import torch or communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.weight_sync.plan import Ints, Pieces


@dataclass(frozen=True, slots=True)
class TrainRanks:
    """All ranks of a run in Megatron's order: stages are the slowest axis, tensor parallelism is the fastest."""

    layout: ReplicaLayout
    num_ranks: int
    ranks_per_node: int
    num_experts: int = 0

    @property
    def per_stage(self) -> int:
        """Ranks of one stage over all replicas."""
        return self.num_ranks // self.layout.pp

    def node(self, rank: int) -> int:
        """The machine that a rank runs on."""
        return rank // self.ranks_per_node

    def source_ranks(self, pieces: Pieces, *, on: int) -> Ints:
        """[N] who gives each piece to the engine rank that shares rank `on`'s device."""
        kinds, number = self.kinds(pieces)
        return self.source_ranks_of_kinds(kinds, on=on)[number]

    def kinds(self, pieces: Pieces) -> tuple[Ints, Ints]:
        """What distinguishes those who hold a piece: [K 3] stages, shards and blocks of experts; [N] that of each."""
        num_local = max(1, self.num_experts // self.layout.ep)
        block = np.where(pieces.expert < 0, -1, pieces.expert // num_local)
        kinds, number = np.unique(np.stack([pieces.stage, pieces.shard, block], axis=1), axis=0, return_inverse=True)
        return kinds, number.reshape(-1)

    def source_ranks_of_kinds(self, kinds: Ints, *, on: int) -> Ints:
        """[K] who gives pieces of each kind to rank `on`."""
        return np.array([self._nearest(*kind, on=on) for kind in kinds.tolist()], dtype=np.int64)

    def _nearest(self, stage: int, shard: int, block: int, *, on: int) -> int:
        """Of the ranks that hold a kind of piece alike: `on` itself, one of its node, one at its place in the stage,
        one of its tensor-parallel group, of its replica, any; of equals the next in the ring, so that all give alike.
        """
        ranks = stage * self.per_stage + self._holders(shard, block)
        place, mine = ranks % self.per_stage, on % self.per_stage
        far = np.array([ranks // self.ranks_per_node != self.node(on)])
        groups = [place // size != mine // size for size in (1, self.layout.tp, self.layout.per_stage)]
        keys = np.concatenate([[(place - mine) % self.per_stage], groups[::-1], far, [ranks != on]])
        return int(ranks[np.lexsort(keys)[0]])

    def _holders(self, shard: int, block: int) -> Ints:
        """Places in a stage."""
        places: Ints = np.arange(self.per_stage)
        layout = self.layout
        if block < 0:
            return places if shard < 0 else places[places % layout.tp == shard]
        holds = places // layout.etp % layout.ep == block
        found: Ints = places[holds if shard < 0 else holds & (places % layout.etp == shard)]
        return found


def exchange_groups(needed: Sequence[Iterable[int]]) -> list[tuple[int, ...]]:
    """The smallest groups of ranks that exchange nothing with ranks outside; `needed[r]` are those who give to rank r.

    With strided engines these are the micro-DP groups of HybridFlow: the ranks whose engine ranks hold the same.
    """
    leader = list(range(len(needed)))

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    for rank, source_ranks in enumerate(needed):
        for source in source_ranks:
            first, second = sorted((find(rank), find(source)))
            leader[second] = first
    members: dict[int, list[int]] = {}
    for rank in range(len(needed)):
        members.setdefault(find(rank), []).append(rank)
    return [tuple(ranks) for ranks in members.values()]
