"""Buckets hold what was asked for, each piece once, and nothing is lost between packing and scattering."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.weight_sync.exchange import COLUMN, COLUMNS, ITEMSIZE, ROW, ROWS, RULE, expand, lay_out
from rlmegatron.weight_sync.plan import Ints

WIDTH = 40
RECTANGLE = st.tuples(
    st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(1, 12), st.integers(1, 30), st.booleans()
)
REQUESTS = st.lists(st.lists(RECTANGLE, max_size=8), min_size=1, max_size=4)


def table(rectangles: list[tuple[int, int, int, int, int, bool]]) -> Ints:
    """Elements of odd rules have 4 bytes there, so that one rectangle never has two sizes."""
    rows = [
        (rule, row, column, WIDTH, rows, columns, 4 if rule % 2 else 2)
        for rule, row, column, rows, columns, _ in rectangles
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 7)


@settings(deadline=None, max_examples=200)
@given(REQUESTS, st.sampled_from([16, 64, 256, 1024, 100_000]))
def test_every_request_is_answered_by_chunks_that_make_it_up(
    asked: list[list[tuple[int, int, int, int, int, bool]]], slot: int
) -> None:
    requests = [table(rectangles) for rectangles in asked]
    stream, answers = lay_out(requests, slot)
    for wanted, answer in zip(requests, answers, strict=True):
        assert np.array_equal(stream.rectangles[answer], wanted)
        counts = [np.zeros((rows, columns), dtype=int) for rows, columns in wanted[:, [ROWS, COLUMNS]]]
        for request, chunk in zip(*expand(answer, stream.first), strict=True):
            row, column, rows, columns = stream.chunks[chunk, :4]
            counts[request][row : row + rows, column : column + columns] += 1
        assert all((count == 1).all() for count in counts)


@settings(deadline=None, max_examples=200)
@given(REQUESTS, st.sampled_from([16, 64, 256, 1024, 100_000]))
def test_chunks_fill_buckets_without_a_gap_or_an_overlap(
    asked: list[list[tuple[int, int, int, int, int, bool]]], slot: int
) -> None:
    """Each begins where the one before it ends, at a multiple of its elements' size, and no bucket is overfull."""
    stream, _ = lay_out([table(rectangles) for rectangles in asked], slot)
    end, last = 0, 0
    for rectangle, bounds in enumerate(zip(stream.first, stream.first[1:], strict=False)):
        for _, _, rows, columns, bucket, byte in stream.chunks[slice(*bounds)].tolist():
            if bucket != last:
                assert bucket == last + 1 and stream.filled[last] == end
                end, last = 0, bucket
            itemsize = stream.rectangles[rectangle, ITEMSIZE]
            assert byte == end and byte % itemsize == 0
            end += rows * columns * itemsize
            assert end <= slot
    assert stream.filled.sum() == sum(
        rows * columns * itemsize for rows, columns, itemsize in stream.rectangles[:, [ROWS, COLUMNS, ITEMSIZE]]
    )


def test_what_several_ranks_ask_for_is_sent_once() -> None:
    one = table([(0, 0, 0, 2, 3, False), (2, 1, 0, 1, 4, False)])
    stream, answers = lay_out([one, one[1:], one[:0]], 1024)
    assert len(stream.rectangles) == 2 and stream.filled.tolist() == [2 * (6 + 4)]
    assert [len(answer) for answer in answers] == [2, 1, 0]
    assert answers[1][0] == answers[0][1]


def test_wide_elements_come_first() -> None:
    stream, _ = lay_out([table([(0, 0, 0, 1, 3, False), (1, 0, 0, 1, 1, False)])], 1024)
    assert stream.rectangles[:, [RULE, ROW, COLUMN, ITEMSIZE]].tolist() == [[1, 0, 0, 4], [0, 0, 0, 2]]


@pytest.mark.parametrize(("slot", "num_chunks"), [(1 << 20, 1), (8 * 80, 6), (8 * 160, 3), (8 * 40, 12)])
def test_a_piece_larger_than_an_eighth_of_a_slot_is_cut(slot: int, num_chunks: int) -> None:
    """6 rows of 80 bytes: by rows, and where a row is longer than that by columns."""
    stream, _ = lay_out([table([(0, 0, 0, 6, 40, False)])], slot)
    assert len(stream.chunks) == num_chunks


def test_nothing_asked_is_nothing_sent() -> None:
    stream, answers = lay_out([table([])], 1024)
    assert len(stream.filled) == len(stream.chunks) == len(answers[0]) == 0
