"""What a plan moves over the links between ranks, beside the least that any plan can.

In: a `Plan` and the ranks on which engines lie. Out: bytes by rank. Pure; must never import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.weight_sync.plan import Plan


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that each rank of a replica receives from and sends to others; `bound` is the least it can receive.

    The bound is HybridFlow's (arXiv 2409.19256, section 5): a rank that keeps its shard of a model of M bytes in an
    engine of 1/t of it has (1/t - 1/n) M to get, where n ranks hold the model. It presumes that nothing is held twice:
    what every rank holds alike (norms, routers, latent projections) costs less, what an engine replicates (KV heads)
    more.
    """

    received: tuple[int, ...]
    sent: tuple[int, ...]
    bound: int

    @property
    def total(self) -> int:
        """Over all ranks."""
        return sum(self.received)


def strided_engines(layout: ReplicaLayout, tensor: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of every engine of a replica, chosen so that a rank's own shard is part of what its engine rank holds.

    With TP 8 and engines of 2: (0, 4), (1, 5), (2, 6), (3, 7). Where `tensor` does not divide TP no choice does that,
    and engines are consecutive ranks.
    """
    num_ranks = layout.pp * layout.per_stage
    if num_ranks % tensor:
        raise ValueError(f"engines of {tensor} ranks cannot be laid over a replica of {num_ranks}")
    if layout.tp % tensor:
        return tuple(tuple(range(first, first + tensor)) for first in range(0, num_ranks, tensor))
    stride = layout.tp // tensor
    firsts = (copy + number for copy in range(0, num_ranks, layout.tp) for number in range(stride))
    return tuple(tuple(range(first, first + layout.tp, stride)) for first in firsts)


def traffic(plan: Plan, engines: Sequence[Sequence[int]], *, itemsize: int) -> Traffic:
    """The bytes of one publish; engine rank j of every engine receives `plan.pieces[j]`."""
    num_ranks = plan.layout.pp * plan.layout.per_stage
    received, sent = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    for ranks in engines:
        for engine_rank, rank in enumerate(ranks):
            sources = plan.sources(engine_rank, on=rank)
            sizes = plan.pieces[engine_rank].num_elements() * itemsize
            moved = np.bincount(sources, weights=sizes, minlength=num_ranks).astype(np.int64)
            moved[rank] = 0
            received[rank] += moved.sum()
            sent += moved
    whole = sum(int(np.prod(part.shape)) for rule in plan.rules if not rule.copy for part in rule.parts) * itemsize
    bound = whole // len(engines[0]) - whole // num_ranks
    return Traffic(tuple(received.tolist()), tuple(sent.tolist()), bound)
