"""What a reshard moves over the links between ranks, beside the least that any could.

In: the pieces of every rank of an engine, the ranks of a run and where its engines lie. Out: bytes by rank. Pure; must
never import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.models.rules import Rule
from rlmegatron.weight_sync.plan import Ints, Pieces
from rlmegatron.weight_sync.sources import TrainRanks


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each rank receives from and sends to others, and those who give to it, itself among them.

    `bound` is the least that a rank can receive where shards are even (`least_bytes`).
    """

    received: tuple[int, ...]
    sent: tuple[int, ...]
    source_ranks: tuple[frozenset[int], ...]
    bound: int

    @property
    def total(self) -> int:
        """Over all ranks."""
        return sum(self.received)


def least_bytes(num_bytes: int, layout: ReplicaLayout, *, engine_tensor: int) -> int:
    """HybridFlow's bound (arXiv 2409.19256, section 5) on what a rank receives.

    A rank wants 1/engine_tensor of a model of `num_bytes`, less what it holds of that: at best its own part where a
    stage is cut into at least as many, else as much of its stage as its engine rank serves. This presumes that nothing
    is held twice: what every rank holds alike (norms, routers, latent projections) costs less, what engines replicate
    (KV heads) more.
    """
    return num_bytes // engine_tensor - num_bytes // (layout.pp * max(layout.per_stage, engine_tensor))


def model_bytes(rules: Iterable[Rule], *, itemsize: int) -> int:
    """Of all tensors of a model whose elements have `itemsize` bytes, but for those that stay in fp32."""
    return sum(
        prod(part.shape) * (4 if rule.keeps_fp32 else itemsize)
        for rule in rules
        if not rule.copy
        for part in rule.parts
    )


def traffic(
    rules: Sequence[Rule],
    pieces: Sequence[Pieces],
    ranks: TrainRanks,
    engines: Sequence[Sequence[int]],
    *,
    itemsize: int,
) -> Traffic:
    """Of one publish; rank j of every engine receives `pieces[j]`."""
    received, sent = (np.zeros(ranks.num_ranks, dtype=np.int64) for _ in range(2))
    source_ranks: list[frozenset[int]] = [frozenset()] * ranks.num_ranks
    itemsizes = np.array([4 if rule.keeps_fp32 else itemsize for rule in rules], dtype=np.int64)
    by_kind = [_bytes_by_kind(part, itemsizes, ranks) for part in pieces]
    for engine in engines:
        for (kinds, sizes), rank in zip(by_kind, engine, strict=True):
            chosen = ranks.source_ranks_of_kinds(kinds, on=rank)
            moved = np.bincount(chosen, weights=sizes, minlength=ranks.num_ranks).astype(np.int64)
            source_ranks[rank] = frozenset(np.nonzero(moved)[0].tolist())
            moved[rank] = 0
            received[rank] += moved.sum()
            sent += moved
    bound = least_bytes(model_bytes(rules, itemsize=itemsize), ranks.layout, engine_tensor=len(engines[0]))
    return Traffic(tuple(received.tolist()), tuple(sent.tolist()), tuple(source_ranks), bound)


def _bytes_by_kind(pieces: Pieces, itemsizes: Ints, ranks: TrainRanks) -> tuple[Ints, Ints]:
    kinds, number = ranks.kinds(pieces)
    sizes = np.bincount(number, weights=pieces.num_elements() * itemsizes[pieces.rule], minlength=len(kinds))
    return kinds, sizes.astype(np.int64)
