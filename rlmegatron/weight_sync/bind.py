"""From pieces to segments: the numbers by which memory is copied, once everybody has said where things lie.

In: pieces, who gives each, address books and streams. Out: tables of segments, as `segments.py` executes them. Must
never communicate or look into a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlmegatron.weight_sync.address_book import AddressBook
from rlmegatron.weight_sync.exchange import COLUMN, COLUMNS, ITEMSIZE, ROW, ROWS, RULE, WIDTH, Stream, expand
from rlmegatron.weight_sync.plan import Ints, Pieces
from rlmegatron.weight_sync.segments import merge_segments

SLOT_DTYPES = {4: "float32", 2: "bfloat16"}
"""What lies in a bucket, by the bytes of an element; also all that engines' parameters may be made of."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Copies straight from training parameters: `storages` are (rank, number of its storage), as the table counts."""

    storages: tuple[tuple[int, int], ...]
    table: Ints


def direct(pieces: Pieces, source_ranks: Ints, books: Mapping[int, AddressBook]) -> Direct:
    """Segments whose source is the source rank's own memory."""
    storage, offset = _addresses(pieces.rule, source_ranks, books)
    keys, number = np.unique(np.stack([source_ranks, storage]), axis=1, return_inverse=True)
    source = offset + pieces.source_row * pieces.source_width + pieces.source_column
    table = _segments(
        (number.reshape(-1), source, pieces.source_width),
        (pieces.parameter, pieces.row * pieces.width + pieces.column, pieces.width),
        pieces.rows,
        pieces.columns,
    )
    return Direct(tuple((int(rank), int(one)) for rank, one in keys.T), merge_segments(table))


def requests_of(pieces: Pieces, itemsizes: Ints) -> Ints:
    """[N 7] what a rank asks of the source rank of these pieces; `itemsizes` [P] are of the engine's parameters."""
    columns: list[Ints] = [np.empty(0, dtype=np.int64)] * 7
    columns[RULE], columns[ROW], columns[COLUMN] = pieces.rule, pieces.source_row, pieces.source_column
    columns[WIDTH], columns[ROWS], columns[COLUMNS] = pieces.source_width, pieces.rows, pieces.columns
    columns[ITEMSIZE] = itemsizes[pieces.parameter]
    return np.stack(columns, axis=1)


def packing(stream: Stream, book: AddressBook, slot_starts: Ints) -> tuple[Ints, Ints]:
    """([C] bucket, [C 8] segments) from this rank's storages into its slot, which begins at byte `slot_starts[k]` of
    bucket k; destinations are a bucket seen as fp32 (0) and as bf16 (1)."""
    rectangle = np.repeat(np.arange(len(stream.rectangles)), np.diff(stream.first))
    asked, chunks = stream.rectangles[rectangle], stream.chunks
    storage, offset = book.find(asked[:, RULE])
    start = (asked[:, ROW] + chunks[:, 0]) * asked[:, WIDTH] + asked[:, COLUMN] + chunks[:, 1]
    slot, element = _in_slot(asked[:, ITEMSIZE], slot_starts[chunks[:, 4]] + chunks[:, 5])
    table = _segments(
        (storage, offset + start, asked[:, WIDTH]), (slot, element, chunks[:, 3]), chunks[:, 2], chunks[:, 3]
    )
    return chunks[:, 4], table


def scattering(pieces: Pieces, answer: Ints, stream: Stream, slot_starts: Ints) -> tuple[Ints, Ints]:
    """([C] bucket, [C 8] segments) from one source rank's slot, which begins at byte `slot_starts[k]` of bucket k."""
    request, chunk = expand(answer, stream.first)
    chunks, wanted = stream.chunks[chunk], pieces.take(request)
    itemsize = stream.rectangles[answer[request], ITEMSIZE]
    slot, element = _in_slot(itemsize, slot_starts[chunks[:, 4]] + chunks[:, 5])
    home = (wanted.row + chunks[:, 0]) * wanted.width + wanted.column + chunks[:, 1]
    table = _segments((slot, element, chunks[:, 3]), (wanted.parameter, home, wanted.width), chunks[:, 2], chunks[:, 3])
    return chunks[:, 4], table


def by_bucket(parts: Sequence[tuple[Ints, Ints]], num_buckets: int) -> list[Ints]:
    """One table for each bucket."""
    buckets = np.concatenate([bucket for bucket, _ in parts] or [np.empty(0, dtype=np.int64)])
    tables = np.concatenate([table for _, table in parts] or [np.empty((0, 8), dtype=np.int64)])
    return [merge_segments(tables[buckets == number]) for number in range(num_buckets)]


def _addresses(rules: Ints, source_ranks: Ints, books: Mapping[int, AddressBook]) -> tuple[Ints, Ints]:
    storage, offset = np.zeros_like(rules), np.zeros_like(rules)
    for rank in np.unique(source_ranks).tolist():
        mine = source_ranks == rank
        storage[mine], offset[mine] = books[rank].find(rules[mine])
    return storage, offset


def _in_slot(itemsize: Ints, byte: Ints) -> tuple[Ints, Ints]:
    """Which view of a bucket, as in `SLOT_DTYPES`, and which element of it."""
    assert not (byte % itemsize).any(), "an element lies across two"
    return (itemsize == 2).astype(np.int64), byte // itemsize


def _segments(source: tuple[Ints, Ints, Ints], destination: tuple[Ints, Ints, Ints], rows: Ints, columns: Ints) -> Ints:
    return np.stack([*source, *destination, rows, columns], axis=1).astype(np.int64)
