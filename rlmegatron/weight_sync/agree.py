"""How the ranks agree, once, on who gives what to whom: a plan of each, bound to the memory of all.

In: what this rank's part of its engine wants, and the training parameters it holds. Out: an `Agreement`. Every step
that can fail is settled over the world, so that nobody waits for a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from rlmegatron.distributed.world import World
from rlmegatron.weight_sync.address_book import AddressBook
from rlmegatron.weight_sync.bind import Direct, direct, requests_of
from rlmegatron.weight_sync.buckets import BucketGroup
from rlmegatron.weight_sync.offers import Reply, bind_offers, offer_all, offer_each
from rlmegatron.weight_sync.plan import Ints, Pieces
from rlmegatron.weight_sync.shared_memory import Handle
from rlmegatron.weight_sync.shared_parameters import SharedParameters
from rlmegatron.weight_sync.sources import TrainRanks, exchange_groups


@dataclass(frozen=True, slots=True)
class Side:
    """What a rank brings along: its pieces, who gives each, the bytes of an element of each of the engine's parameters,
    and its own parameters."""

    pieces: Pieces
    source_ranks: Ints
    itemsizes: Ints
    shared: SharedParameters

    def of(self, which: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Side:
        """With some of the pieces."""
        return Side(self.pieces.take(which), self.source_ranks[which], self.itemsizes, self.shared)

    def num_bytes(self) -> Ints:
        """[N] as they arrive."""
        return self.pieces.num_elements() * self.itemsizes[self.pieces.parameter]


@dataclass(frozen=True, slots=True)
class Known:
    """What everybody learns of a rank: where its parameters lie, who gives to it, on a CPU how to map its memory."""

    book: AddressBook
    source_ranks: Ints
    handles: list[Handle] | None

    @classmethod
    def of(cls, side: Side) -> Known:
        """For the other ranks."""
        on_cpu = side.shared.device.type == "cpu"
        return cls(side.shared.book, np.unique(side.source_ranks), side.shared.handles() if on_cpu else None)


@dataclass(frozen=True, slots=True)
class Terms:
    """`within_node` lets the ranks of a node read each other's memory; else everything of others goes by bucket.

    `group_of` makes the process group of some ranks; every rank calls it alike.
    """

    within_node: bool
    bytes_per_bucket: int
    timeout_s: float
    group_of: Callable[[Sequence[int]], dist.ProcessGroup]


@dataclass(frozen=True, slots=True)
class Agreement:
    """`direct`, and one table for each bucket of `group`, fill the engine's rank.

    `sources` map the storages of `direct`; on a GPU there are none that would last. `received` are the bytes that come
    straight from other ranks' memory.
    """

    direct: Direct
    sources: list[Handle] | None
    tables: list[Ints]
    group: BucketGroup | None
    received: int

    @property
    def bytes_received(self) -> int:
        """What a transfer brings to this rank's device from those of others."""
        return self.received + (self.group.received if self.group else 0)


def agree(world: World, ranks: TrainRanks, side: Side, known: Sequence[Known], terms: Terms) -> Agreement:
    """Collective over the world; `known` of every rank."""
    groups = exchange_groups([one.source_ranks.tolist() for one in known])
    by_memory = [terms.within_node and len({ranks.node(rank) for rank in group}) == 1 for group in groups]
    mine = next(number for number, group in enumerate(groups) if world.rank in group)
    own = side.source_ranks == world.rank
    straight = side if by_memory[mine] else side.of(own)
    books = {rank: one.book for rank, one in enumerate(known)}
    found = world.settle("reshard (bind)", lambda: direct(straight.pieces, straight.source_ranks, books))
    received = int(straight.num_bytes()[straight.source_ranks != world.rank].sum())
    tables: list[Ints] = []
    group = None
    if not all(by_memory):
        rest = side.of(np.zeros_like(own) if by_memory[mine] else ~own)
        processes = [None if is_near else terms.group_of(one) for is_near, one in zip(by_memory, groups, strict=True)]
        tables, group = _agree_on_buckets(world, rest, books[world.rank], groups[mine], processes[mine], terms)
    return Agreement(found, _sources(found, known), tables, group, received)


def _sources(found: Direct, known: Sequence[Known]) -> list[Handle] | None:
    """None on every rank alike, whatever it reads."""
    lasting = [one.handles for one in known if one.handles is not None]
    if len(lasting) < len(known):
        return None
    return [lasting[rank][storage] for rank, storage in found.storages]


def _agree_on_buckets(
    world: World, side: Side, book: AddressBook, members: Sequence[int], group: dist.ProcessGroup | None, terms: Terms
) -> tuple[list[Ints], BucketGroup | None]:
    """Everybody asks, everybody says what it will send, and each binds both."""
    mine = {rank: side.of(side.source_ranks == rank).pieces for rank in members}
    requests: list[Ints | None] = [None] * world.size
    for rank, pieces in mine.items():
        requests[rank] = requests_of(pieces, side.itemsizes)
    received = world.exchange(requests)
    asked = {rank: received[rank] for rank in members}
    offer = world.settle("reshard (buckets)", lambda: offer_all(asked, world.rank, terms.bytes_per_bucket))
    serves_all = world.gather(offer.serves_all)
    if not all(serves_all[rank] for rank in members):
        offer = offer_each(asked, terms.bytes_per_bucket)
    outgoing: list[Reply | None] = [None] * world.size
    for rank, reply in offer.replies.items():
        outgoing[rank] = reply
    incoming = world.exchange(outgoing)
    replies = {rank: incoming[rank] for rank in members}
    counts = world.gather(offer.num_buckets)
    num_buckets = max(counts[rank] for rank in members)

    def bind() -> tuple[list[Ints], BucketGroup | None]:
        if group is None or not num_buckets:
            return [], None
        bound = bind_offers(offer, replies, mine, book, group, num_buckets=num_buckets)
        part = BucketGroup(bound.swap, bound.packing, side.shared.storages, side.shared.device, terms.timeout_s)
        return bound.scattering, part

    return world.settle("reshard (buckets)", bind)
