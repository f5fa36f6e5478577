"""What a rank offers to the members of its group: the same to all, or to each what it asked for.

In: what each member asks of this rank. Out: an `Offer`, of which every member is sent its part, and how the answers of
all make one `Swap`. Must never communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from rlmegatron.weight_sync.address_book import AddressBook
from rlmegatron.weight_sync.bind import by_bucket, packing, scattering
from rlmegatron.weight_sync.exchange import Stream, lay_out
from rlmegatron.weight_sync.plan import Ints, Pieces
from rlmegatron.weight_sync.swaps import AllGather, AllToAll, Swap, matrix

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Reply:
    """To one member: which rectangle of the stream answers each of its requests."""

    answer: Ints
    stream: Stream


@dataclass(frozen=True, slots=True)
class Offer:
    """`replies` by member; `is_common` says that all are about one stream, and `serves_all` that all of that stream
    goes to everybody but this rank itself."""

    replies: Mapping[int, Reply]
    is_common: bool
    serves_all: bool

    @property
    def num_buckets(self) -> int:
        """The most that any of its streams fills."""
        return max(len(reply.stream.filled) for reply in self.replies.values())


def offer_all(asked: Mapping[int, Ints], me: int, bytes_per_bucket: int) -> Offer:
    """One stream with everything that anybody asked for."""
    stream, answers = lay_out(list(asked.values()), _slot(bytes_per_bucket, len(asked)))
    replies = {rank: Reply(answer, stream) for rank, answer in zip(asked, answers, strict=True)}
    counts = {len(np.unique(reply.answer)) for rank, reply in replies.items() if rank != me}
    return Offer(replies, is_common=True, serves_all=counts <= {len(stream.rectangles)})


def offer_each(asked: Mapping[int, Ints], bytes_per_bucket: int) -> Offer:
    """A stream for every member; half of a bucket is for what goes out."""
    replies = {}
    for rank, requests in asked.items():
        stream, answers = lay_out([requests], _slot(bytes_per_bucket // 2, len(asked)))
        replies[rank] = Reply(answers[0], stream)
    return Offer(replies, is_common=False, serves_all=False)


@dataclass(frozen=True, slots=True)
class Bound:
    """A swap with one table for each bucket on either side: to pack it, and to scatter it."""

    swap: Swap
    packing: list[Ints]
    scattering: list[Ints]


def bind_offers(
    offer: Offer,
    replies: Mapping[int, Reply],
    mine: Mapping[int, Pieces],
    book: AddressBook,
    group: dist.ProcessGroup,
    *,
    num_buckets: int,
) -> Bound:
    """`replies` are those to this rank, of every member, and `mine` the pieces that it asked of each.

    In an all-gather `replies` holds, for this rank itself, the stream that it sends.
    """
    members = list(replies)
    incoming = matrix([reply.stream.filled for reply in replies.values()], num_buckets)
    swap: AllGather | AllToAll
    if offer.is_common:
        swap = AllGather(group, incoming)
        starts, me = swap.starts, group.rank()
        packed = [packing(replies[members[me]].stream, book, starts[:, me])]
    else:
        outgoing = matrix([reply.stream.filled for reply in offer.replies.values()], num_buckets)
        swap = AllToAll(group, outgoing, incoming)
        starts = swap.incoming_starts
        packed = [
            packing(reply.stream, book, swap.outgoing_starts[:, member])
            for member, reply in enumerate(offer.replies.values())
        ]
    scattered = [
        scattering(mine[rank], reply.answer, reply.stream, starts[:, member])
        for member, (rank, reply) in enumerate(replies.items())
    ]
    return Bound(swap, by_bucket(packed, num_buckets), by_bucket(scattered, num_buckets))


def _slot(bytes_per_bucket: int, num_members: int) -> int:
    """The most that one member may put into a bucket."""
    return max(_ALIGNMENT, bytes_per_bucket // num_members // _ALIGNMENT * _ALIGNMENT)
