"""Which ranks form which engine, and which cores and devices an engine gets.

In: sizes as plain numbers. Out: `EnginePlacement`s, core lists and a list of devices. Must never import torch, sglang
or read the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlmegatron.config.partition import engine_groups


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One engine: the ranks whose devices it shares, the first of which owns its server process."""

    index: int
    ranks: tuple[int, ...]
    """In the order of the engine's own: its rank j runs beside rank `ranks[j]`."""
    node: int
    local_ranks: tuple[int, ...]
    """`ranks` counted on their node, and so the numbers of their devices there."""

    @property
    def lead(self) -> int:
        """The rank that starts the engine and speaks to it."""
        return self.ranks[0]


def place_engines(
    *, world_size: int, tensor: int, ranks_per_node: int, train_tensor: int
) -> tuple[EnginePlacement, ...]:
    """Engines of `tensor` ranks each, by their first rank, so that a rank's own shard is of use to its engine.

    ranks_per_node: ranks, and so devices, of one node. train_tensor: tensor parallelism in training, which divides the
    world. `engine_groups` says which ranks. Raises ValueError when `tensor` does not divide the world or an engine
    would span nodes.
    """
    if world_size % tensor:
        allowed = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        raise ValueError(
            f"rollout.tensor: {tensor} does not divide the world size ({world_size}); use one of {allowed}"
        )
    groups = engine_groups(
        world_size=world_size, tensor=tensor, train_tensor=train_tensor, ranks_per_node=ranks_per_node
    )
    return tuple(
        EnginePlacement(
            index=index,
            ranks=ranks,
            node=ranks[0] // ranks_per_node,
            local_ranks=tuple(rank % ranks_per_node for rank in ranks),
        )
        for index, ranks in enumerate(groups)
    )


def engine_of(rank: int, placements: Sequence[EnginePlacement]) -> EnginePlacement:
    """The engine that `rank` belongs to."""
    for placement in placements:
        if rank in placement.ranks:
            return placement
    raise AssertionError(f"rank {rank} belongs to no engine of {placements}")


def visible_devices(devices: Sequence[int], *, inherited: str | None, num_visible: int) -> str:
    """CUDA_VISIBLE_DEVICES of an engine whose rank j runs on device `devices[j]`, which will be its device j.

    The other devices follow, for their ranks hand memory to the engine. inherited: the variable as this process has it,
    entries of which may be numbers or GPU and MIG identities. num_visible: devices that this process sees. Raises
    ValueError for a device that it does not see.
    """
    entries = list(map(str, range(num_visible))) if inherited is None else inherited.split(",")[:num_visible]
    unseen = [device for device in devices if device >= len(entries)]
    if unseen:
        given = "is not set" if inherited is None else f"is {inherited!r}"
        raise ValueError(
            f"an engine rank needs device {unseen[0]}, but this process sees {len(entries)} (CUDA_VISIBLE_DEVICES "
            f"{given}); every rank must see the device of each rank on its node"
        )
    others = [device for device in range(len(entries)) if device not in devices]
    return ",".join(entries[device].strip() for device in (*devices, *others))


def engine_cores(placement: EnginePlacement, cores: Sequence[int], *, ranks_per_node: int) -> tuple[str, ...]:
    """The core list of each engine rank: the share of the rank beside which it runs. cores: those of the node."""
    shares = share_cores(cores, num_shares=ranks_per_node)
    return tuple(shares[local_rank] for local_rank in placement.local_ranks)


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
