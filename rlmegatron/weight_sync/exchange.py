"""What a rank puts into the buckets of a collective: every piece that another rank of its group wants, once.

In: requests, as rectangles of this rank's parameters. Out: a `Stream` that says in which bucket and where each lies.
Pure; must never import torch or communicate.

A bucket has one slot per rank of the group, of equal size. Pieces larger than an eighth of a slot are cut, so that
slots fill well; wide elements come first, so that none needs padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlmegatron.weight_sync.plan import Ints, runs

RULE, ROW, COLUMN, WIDTH, ROWS, COLUMNS, ITEMSIZE = range(7)
"""Columns of a request: a rectangle of a training parameter, and the bytes of an element in the engine."""

_PARTS_PER_SLOT = 8


@dataclass(frozen=True, slots=True)
class Stream:
    """`rectangles` [U 7] are what is sent, `first` [U + 1] the numbers of their chunks; of each chunk [C 6] the row and
    column in its rectangle, the rows and columns, the bucket and the byte in the slot; `filled` [K] the bytes by
    bucket.
    """

    rectangles: Ints
    first: Ints
    chunks: Ints
    filled: Ints


def lay_out(requests: Sequence[Ints], slot_bytes: int) -> tuple[Stream, list[Ints]]:
    """`requests[i]` [N 7] are those of one rank; the second value [N] says which rectangle answers each."""
    every = np.concatenate([*requests, np.empty((0, 7), dtype=np.int64)])
    keys = every.copy()
    keys[:, ITEMSIZE] *= -1
    order = [ITEMSIZE, RULE, ROW, COLUMN, WIDTH, ROWS, COLUMNS]
    unique, answer = np.unique(keys[:, order], axis=0, return_inverse=True)
    rectangles = np.empty_like(unique)
    rectangles[:, order] = unique
    rectangles[:, ITEMSIZE] *= -1
    chunks, first = _cut(rectangles, max(1, slot_bytes // _PARTS_PER_SLOT))
    sizes = chunks[:, 2] * chunks[:, 3] * np.repeat(rectangles[:, ITEMSIZE], np.diff(first))
    buckets, offsets, filled = _fill(sizes.tolist(), slot_bytes)
    stream = Stream(rectangles, first, np.column_stack([chunks, buckets, offsets]).astype(np.int64), filled)
    bounds = np.cumsum([len(part) for part in requests])[:-1]
    return stream, np.split(answer.reshape(-1).astype(np.int64), bounds)


def _cut(rectangles: Ints, most_bytes: int) -> tuple[Ints, Ints]:
    """Rectangles into chunks of at most `most_bytes`, by rows, and by columns where a row alone is longer."""
    found, first = [], [0]
    for rows, columns, itemsize in rectangles[:, [ROWS, COLUMNS, ITEMSIZE]].tolist():
        across = max(1, min(columns, most_bytes // itemsize))
        down = max(1, min(rows, most_bytes // (across * itemsize))) if across == columns else 1
        for row in range(0, rows, down):
            for column in range(0, columns, across):
                found.append((row, column, min(down, rows - row), min(across, columns - column)))
        first.append(len(found))
    return np.array(found, dtype=np.int64).reshape(-1, 4), np.array(first, dtype=np.int64)


def _fill(sizes: list[int], slot_bytes: int) -> tuple[list[int], list[int], Ints]:
    buckets, offsets, filled = [], [], [0]
    for size in sizes:
        if filled[-1] and filled[-1] + size > slot_bytes:
            filled.append(0)
        buckets.append(len(filled) - 1)
        offsets.append(filled[-1])
        filled[-1] += size
    return buckets, offsets, np.array(filled if sizes else [], dtype=np.int64)


def expand(answer: Ints, stream_first: Ints) -> tuple[Ints, Ints]:
    """For requests answered by rectangles `answer` [N]: [C'] the request of each chunk, and [C'] the chunk."""
    return runs(stream_first[answer], stream_first[answer + 1])
