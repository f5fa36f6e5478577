"""The two ways in which the ranks of a group fill each other's buckets: everybody gets all, or everybody gets its own.

In: how many bytes each gives to each, bucket by bucket. Out: where in a bucket each part lies, and the collectives.
Where all want the same, as with strided engines, an all-gather packs each byte once; elsewhere it would bring what
nobody there needs, and an all-to-all brings exactly what is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rlmegatron.weight_sync.plan import Ints

ALIGNMENT = 16
"""Bytes: parts begin at multiples, so that every element does."""


class Swap(Protocol):
    """One rank's part in filling buckets."""

    @property
    def num_buckets(self) -> int:
        """How many are filled, one after another."""

    @property
    def bucket_bytes(self) -> int:
        """What the largest takes."""

    def begin(self, number: int, bucket: Tensor) -> list[dist.Work]:
        """Start to fill bucket `number` [bytes] from what every member has packed into its own."""

    def received(self, number: int) -> int:
        """Bytes of bucket `number` that come from others."""


@dataclass(frozen=True)
class AllGather:
    """`filled[k, m]` are the bytes that member m gives to all in bucket k."""

    group: dist.ProcessGroup
    filled: Ints

    @property
    def num_buckets(self) -> int:
        """See `Swap`."""
        return len(self.filled)

    @cached_property
    def starts(self) -> Ints:
        """[K M] the first byte of each member's part, this rank's own among them."""
        found: Ints = self._strides[:, None] * np.arange(self.filled.shape[1])
        return found

    @cached_property
    def _strides(self) -> Ints:
        most: Ints = self.filled.max(axis=1)
        return _aligned(most)

    @property
    def bucket_bytes(self) -> int:
        """See `Swap`."""
        return int(self._strides.max()) * int(self.filled.shape[1])

    def begin(self, number: int, bucket: Tensor) -> list[dist.Work]:
        """One all-gather where every member gives as much, else a broadcast by each that gives anything, which is also
        what gloo does faster."""
        stride, me, sizes = int(self._strides[number]), self.group.rank(), self.filled[number].tolist()
        if self._is_even(number):
            whole, mine = bucket[: stride * len(sizes)], bucket[stride * me : stride * (me + 1)]
            return [dist.all_gather_single(whole, mine, group=self.group, async_op=True)]
        ranks = dist.get_process_group_ranks(self.group)
        return [
            dist.broadcast(bucket[start : start + size], src=rank, group=self.group, async_op=True)
            for rank, start, size in zip(ranks, self.starts[number].tolist(), sizes, strict=True)
            if size
        ]

    def received(self, number: int) -> int:
        """See `Swap`."""
        if self._is_even(number):
            return int(self._strides[number]) * (int(self.filled.shape[1]) - 1)
        return int(self.filled[number].sum() - self.filled[number, self.group.rank()])

    def _is_even(self, number: int) -> bool:
        return len(set(self.filled[number].tolist())) == 1 and dist.get_backend(self.group) != "gloo"


@dataclass(frozen=True)
class AllToAll:
    """`outgoing[k, m]` and `incoming[k, m]` are the bytes for and from member m in bucket k; the former lie first."""

    group: dist.ProcessGroup
    outgoing: Ints
    incoming: Ints

    @property
    def num_buckets(self) -> int:
        """See `Swap`."""
        return len(self.outgoing)

    @cached_property
    def outgoing_starts(self) -> Ints:
        """[K M] where the part for each member is packed."""
        return _starts(self.outgoing)

    @cached_property
    def incoming_starts(self) -> Ints:
        """[K M] where the part of each member arrives."""
        found: Ints = _starts(self.incoming) + _aligned(self.outgoing).sum(axis=1, keepdims=True)
        return found

    @property
    def bucket_bytes(self) -> int:
        """See `Swap`."""
        return int((_aligned(self.outgoing) + _aligned(self.incoming)).sum(axis=1).max())

    def begin(self, number: int, bucket: Tensor) -> list[dist.Work]:
        """One all-to-all."""
        sent, found = (_aligned(part[number]).tolist() for part in (self.outgoing, self.incoming))
        source, target = bucket[: sum(sent)], bucket[sum(sent) : sum(sent) + sum(found)]
        return [dist.all_to_all_single(target, source, found, sent, group=self.group, async_op=True)]

    def received(self, number: int) -> int:
        """See `Swap`."""
        found = _aligned(self.incoming[number])
        return int(found.sum() - found[self.group.rank()])


def matrix(columns: Sequence[Ints], num_buckets: int) -> Ints:
    """[K M] from the bytes by bucket of each member, who may fill fewer buckets."""
    found = np.zeros((num_buckets, len(columns)), dtype=np.int64)
    for member, column in enumerate(columns):
        found[: len(column), member] = column
    return found


def _starts(sizes: Ints) -> Ints:
    ends: Ints = np.cumsum(_aligned(sizes), axis=1)
    return ends - _aligned(sizes)


def _aligned(sizes: Ints) -> Ints:
    return -(-sizes // ALIGNMENT) * ALIGNMENT
