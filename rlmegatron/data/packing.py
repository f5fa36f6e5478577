"""Which samples share a micro-batch: a pure plan from sequence lengths, the same on every rank.

In: lengths in tokens. Out: sample indices by mini-batch, data-parallel rank and micro-batch. Must never import torch
or anything of ours.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

MicroBatch = list[int]
Plan = list[list[list[MicroBatch]]]
"""Sample indices, indexed [mini_batch][dp_rank][micro_batch]."""


def plan_batches(
    lengths: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    *,
    dp_size: int,
    max_tokens: int,
    micro_batch_multiple: int = 1,
) -> Plan:
    """Cut each mini-batch into micro-batches that are balanced by tokens over the data-parallel ranks.

    lengths: tokens of each sample (prompt and answer), in the order of the batch; N samples.
    mini_batches: the samples of each, from `mini_batches.py`.
    max_tokens: bound on the tokens of a micro-batch; a longer sample gets a micro-batch of its own.
    micro_batch_multiple: the number of micro-batches per rank is a multiple of this (for interleaved pipelines).

    Every sample of a mini-batch occurs once in it. Within a mini-batch every rank has the same number of micro-batches,
    about the smallest that fits, the largest first, and micro-batch j is of similar size on every rank. Micro-batches
    are empty only where a mini-batch has fewer samples than micro-batches; a mini-batch without samples has none.
    Indices ascend in each. Raises ValueError for counts below 1 and negative lengths.
    """
    counts = {"dp_size": dp_size, "max_tokens": max_tokens, "micro_batch_multiple": micro_batch_multiple}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"plan_batches: {name} is {count}, must be at least 1")
    if any(length < 0 for length in lengths):
        raise ValueError(f"plan_batches: a length is negative ({min(lengths)})")
    plan = []
    for members in mini_batches:
        bins = _fill(lengths, members, max_tokens=max_tokens, step=dp_size * micro_batch_multiple)
        plan.append(_deal(lengths, bins, dp_size=dp_size))
    return plan


def _fill(lengths: Sequence[int], samples: Sequence[int], *, max_tokens: int, step: int) -> list[MicroBatch]:
    """Bins of even load, a multiple of `step` in number, none above max_tokens unless it holds one sample."""
    if not samples:
        return []
    descending = sorted(samples, key=lambda index: (-lengths[index], index))
    fewest = _num_bins(lengths, descending, max_tokens=max_tokens)
    num_bins = -(-fewest // step) * step
    while True:
        bins = _spread(lengths, descending, num_bins=num_bins, max_tokens=max_tokens)
        if bins is not None:
            return bins
        # An even spread may need a few more bins than a tight packing. One bin per sample always suffices.
        num_bins += step * max(1, num_bins // (20 * step))


def _num_bins(lengths: Sequence[int], descending: Sequence[int], *, max_tokens: int) -> int:
    """Bins that best-fit-decreasing packing needs; at most 11/9 of the optimum, plus one."""
    rooms: list[int] = []
    num_full = 0
    for index in descending:
        length = lengths[index]
        position = bisect_left(rooms, length)
        if position == len(rooms):
            room = max_tokens
        else:
            room = rooms.pop(position)
        if length > max_tokens:
            num_full += 1
        else:
            insort(rooms, room - length)
    return num_full + len(rooms)


def _spread(
    lengths: Sequence[int], descending: Sequence[int], *, num_bins: int, max_tokens: int
) -> list[MicroBatch] | None:
    """Longest-processing-time scheduling: each sample into the emptiest bin; None if one does not fit there."""
    bins: list[MicroBatch] = [[] for _ in range(num_bins)]
    heap = [(0, 0, position) for position in range(num_bins)]
    for index in descending:
        load, count, position = heap[0]
        if count and load + lengths[index] > max_tokens:
            return None
        bins[position].append(index)
        heapq.heapreplace(heap, (load + lengths[index], count + 1, position))
    return bins


def _deal(lengths: Sequence[int], bins: list[MicroBatch], *, dp_size: int) -> list[list[MicroBatch]]:
    """Bins by rank: in rounds of one each, largest bins first, the largest of a round to the rank with the least."""
    assert len(bins) % dp_size == 0, f"{len(bins)} micro-batches cannot be dealt evenly to {dp_size} ranks"
    loads = [sum(lengths[index] for index in one) for one in bins]
    order = sorted(range(len(bins)), key=lambda position: (-loads[position], position))
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for start in range(0, len(bins), dp_size):
        poorest = sorted(range(dp_size), key=lambda rank: (totals[rank], rank))
        for rank, position in zip(poorest, order[start : start + dp_size], strict=True):
            ranks[rank].append(sorted(bins[position]))
            totals[rank] += loads[position]
    return ranks
