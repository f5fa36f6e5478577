"""Which ranks form which engine, and which cores and devices an engine gets.

In: sizes as plain numbers. Out: `EnginePlacement`s and core lists. Must never import torch, sglang or read the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One engine: the ranks whose devices it shares, the first of which owns its server process."""

    index: int
    ranks: tuple[int, ...]
    node: int
    base_gpu_id: int
    """Device of the engine's first rank, counted on its node."""

    @property
    def lead(self) -> int:
        """The rank that starts the engine and speaks to it."""
        return self.ranks[0]


def place_engines(*, world_size: int, tensor: int, ranks_per_node: int) -> tuple[EnginePlacement, ...]:
    """Engines of `tensor` consecutive ranks each, in rank order.

    ranks_per_node: ranks, and so devices, of one node. Raises ValueError when `tensor` does not divide the world or an
    engine would span nodes.
    """
    if world_size % tensor:
        allowed = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise ValueError(
            f"rollout.tensor: {tensor} does not divide the world size ({world_size}); use one of {allowed}"
        )
    per_node = min(ranks_per_node, world_size)
    if per_node % tensor:
        allowed = ", ".join(str(size) for size in range(1, per_node + 1) if per_node % size == 0)
        raise ValueError(
            f"rollout.tensor: engines of {tensor} ranks would span nodes of {per_node} ranks; use one of {allowed}"
        )
    return tuple(
        EnginePlacement(
            index=index,
            ranks=tuple(range(first, first + tensor)),
            node=first // per_node,
            base_gpu_id=first % per_node,
        )
        for index, first in enumerate(range(0, world_size, tensor))
    )


def engine_of(rank: int, placements: Sequence[EnginePlacement]) -> EnginePlacement:
    """The engine that `rank` belongs to."""
    for placement in placements:
        if rank in placement.ranks:
            return placement
    raise AssertionError(f"rank {rank} belongs to no engine of {placements}")


def share_cores(cores: Sequence[int], *, num_shares: int) -> tuple[str, ...]:
    """Split a node's cores over its engine ranks, evenly and without overlap while there are enough.

    cores: core numbers, as from `os.sched_getaffinity`. Returns one list such as "0-3,8" per share; with fewer cores
    than shares, shares take turns with single cores.
    """
    ordered = sorted(set(cores))
    if not ordered or num_shares < 1:
        raise ValueError(f"cannot split {len(ordered)} cores over {num_shares} engine ranks")
    if len(ordered) < num_shares:
        return tuple(str(ordered[share % len(ordered)]) for share in range(num_shares))
    bounds = [share * len(ordered) // num_shares for share in range(num_shares + 1)]
    return tuple(_as_text(ordered[first:last]) for first, last in pairwise(bounds))


def _as_text(cores: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
