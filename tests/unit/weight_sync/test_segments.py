"""The operator that copies tables of segments: its three implementations against a slow loop, and what it refuses."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from segment_tables import Case, Execute, cases, compile_kernel, copy_in_torch, copy_slowly, copy_with_library

from rlmegatron.weight_sync import segments
from rlmegatron.weight_sync.segments import SegmentTable, check_segments, copy_segments, merge_segments


@pytest.fixture(scope="module", params=["library", "torch", "kernel"])
def execute(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Execute:
    if request.param == "kernel":
        return compile_kernel(tmp_path_factory.mktemp("kernel"))
    return {"library": copy_with_library, "torch": copy_in_torch}[request.param]


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def table_of(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 8)


def assert_copies_alike(case: Case, execute: Execute) -> None:
    """What the table names is written, and not a bit beside it."""
    slow, fast = case.poisoned(), case.poisoned()
    copy_slowly(slow.table, slow.sources, slow.destinations)
    execute(fast.table, fast.sources, fast.destinations)
    for number, (one, other) in enumerate(zip(slow.bits(), fast.bits(), strict=True)):
        wrong = np.flatnonzero(one != other)
        assert not len(wrong), f"destination {number} differs at {wrong[:8]} for\n{case.table}"


@given(case=cases())
@settings(deadline=None, max_examples=40)
def test_random_tables_are_copied_as_by_a_slow_loop(execute: Execute, case: Case) -> None:
    assert_copies_alike(case, execute)


@given(case=cases(most_columns=1500, most_segments=6))
@settings(deadline=None, max_examples=10)
def test_segments_of_several_tiles_are_copied_as_by_a_slow_loop(execute: Execute, case: Case) -> None:
    assert_copies_alike(case, execute)


@given(case=cases(most_columns=3, most_segments=300))
@settings(deadline=None, max_examples=10)
def test_many_tiny_segments_are_copied_as_by_a_slow_loop(execute: Execute, case: Case) -> None:
    assert_copies_alike(case, execute)


def test_fp32_is_rounded_to_bf16_as_torch_does(execute: Execute) -> None:
    """All upper halves, with lower halves below, at and above the middle: halves, denormals, infinities, NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    source = torch.from_numpy((upper | lower).reshape(-1).view(np.float32).copy())
    expected = source.to(torch.bfloat16)
    for columns in (source.numel(), 6):
        destination = torch.zeros(source.numel(), dtype=torch.bfloat16)
        table = table_of([0, 0, columns, 0, 0, columns, source.numel() // columns, columns])
        execute(table, [source], [destination])
        assert torch.equal(destination.isnan(), source.isnan())
        number = ~source.isnan()
        assert torch.equal(destination.view(torch.int16)[number], expected.view(torch.int16)[number])


@pytest.mark.parametrize(("dtype", "to"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("columns", [1, 3, 1000, 1 << 20])
def test_threads_share_a_segment_wherever_its_rows_end(
    dtype: torch.dtype, to: torch.dtype, columns: int, four_threads: None
) -> None:
    num_rows = (5 << 20) // columns
    source = torch.randn(num_rows, columns + 1, dtype=dtype)
    destination = torch.full((num_rows, columns + 2), 7.0, dtype=to)
    copy_with_library(table_of([0, 1, columns + 1, 0, 2, columns + 2, num_rows - 1, columns]), [source], [destination])
    expected = torch.full_like(destination, 7.0)
    expected[:-1, 2:] = source.flatten()[1 : 1 + (num_rows - 1) * (columns + 1)].view(-1, columns + 1)[:, :columns]
    assert torch.equal(destination, expected)


def test_threads_share_a_huge_segment_among_thousands_of_tiny_ones(four_threads: None) -> None:
    source = torch.arange(3 << 20, dtype=torch.int32)
    destination = torch.zeros_like(source)
    huge = 2 << 20
    tiny = [[0, huge + number, 1, 0, len(source) - 1 - number, 1, 1, 1] for number in range(20000)]
    copy_with_library(table_of(*tiny[:9000], [0, 0, huge, 0, 0, huge, 1, huge], *tiny[9000:]), [source], [destination])
    expected = torch.zeros_like(source)
    expected[:huge] = source[:huge]
    expected[-20000:] = source[huge : huge + 20000].flip(0)
    assert torch.equal(destination, expected)


def test_an_empty_table_changes_nothing(execute: Execute) -> None:
    destination = torch.full((5,), 3.0)
    execute(table_of(), [], [destination])
    execute(table_of([0, 0, 1, 0, 0, 1, 0, 4], [0, 0, 1, 0, 0, 1, 4, 0]), [torch.zeros(5)], [destination])
    assert torch.equal(destination, torch.full((5,), 3.0))


def test_parameters_of_any_shape_are_changed_in_place() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 4))
    table = table_of([0, 0, 4, 0, 2, 12, 2, 4])
    copy_with_library(table, [torch.arange(8.0).requires_grad_()], [weight])
    assert weight.flatten().tolist() == [0, 0, 0, 1, 2, 3] + [0] * 8 + [4, 5, 6, 7] + [0] * 6


GOOD = [0, 2, 4, 0, 1, 3, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: 4}, "segment 1 ends outside its source"),
        ({2: 6}, "segment 1 ends outside its source"),
        ({1: 2**62, 2: 2**62, 6: 2**62}, "segment 1 ends outside its source"),
        ({4: 10}, "segment 1 ends outside its destination"),
        ({6: 5}, "segment 1 ends outside its"),
        ({7: 2**62}, "segment 1 ends outside its source"),
        ({2: 0, 5: 2**62, 6: 4}, "segment 1 ends outside its destination"),
        ({5: 2}, "segment 1 has rows that overlap in its destination"),
        ({0: 2}, "segment 1 names a source that is none of the 2"),
        ({3: 2}, "segment 1 names a destination that is none of 2"),
        ({0: 1}, "segment 1 goes from torch.bfloat16 to torch.float32"),
        *(({column: -1}, "segment 1 has a negative number") for column in range(8)),
    ],
)
def test_a_bad_segment_is_named_before_anything_is_copied(changes: dict[int, int], message: str) -> None:
    sources = [torch.zeros(9), torch.zeros(9, dtype=torch.bfloat16)]
    destinations = [torch.zeros(12), torch.zeros(12, dtype=torch.bfloat16)]
    bad = [changes.get(column, value) for column, value in enumerate(GOOD)]
    check_segments(table_of(GOOD, GOOD), sources, destinations)
    with pytest.raises(ValueError, match=message):
        check_segments(table_of(GOOD, bad, bad), sources, destinations)
    with pytest.raises(ValueError, match=message):
        torch.ops.rlmegatron.copy_segments(sources, destinations, torch.from_numpy(table_of(GOOD, bad)))


@pytest.mark.parametrize(
    ("table", "destination", "message"),
    [
        (table_of(GOOD), torch.zeros(3, 4).T, "destination 0 of shape .* is not contiguous"),
        (table_of(GOOD), torch.zeros(12, device="meta"), "destination 0 is on meta"),
        (table_of(GOOD), torch.zeros(12, dtype=torch.complex128), "destination 0 is torch.complex128"),
        (table_of(GOOD)[:, :7], torch.zeros(12), r"int64 \[N 8\], got torch.int64 \[1, 7\]"),
        (table_of(GOOD).astype(np.int32), torch.zeros(12), r"int64 \[N 8\], got torch.int32"),
    ],
)
def test_what_cannot_be_addressed_is_refused(table: np.ndarray, destination: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentTable.of(table, [torch.zeros(9)], [destination])


def test_a_table_is_executed_only_on_tensors_like_those_it_was_made_for() -> None:
    source, destination = torch.arange(9.0), torch.zeros(12)
    table = SegmentTable.of(table_of(GOOD), [source], [destination])
    assert table.num_bytes == 2 * 3 * 4
    copy_segments(table, [source + 1], [destination.view(3, 4)])
    assert destination.tolist() == [0, 3, 4, 5, 7, 8, 9, 0, 0, 0, 0, 0]
    with pytest.raises(
        ValueError, match="source 0 has 8 elements of torch.float32 on cpu, but the table was made for 9"
    ):
        copy_segments(table, [source[:8]], [destination])
    with pytest.raises(ValueError, match="destination 0 has 12 elements of torch.bfloat16"):
        copy_segments(table, [source], [destination.bfloat16()])
    with pytest.raises(ValueError, match="made for 1 source tensors, got 2"):
        copy_segments(table, [source, source], [destination])


def test_the_operator_changes_only_what_its_schema_says() -> None:
    arguments = [torch.arange(9.0)], [torch.zeros(12)], torch.from_numpy(table_of(GOOD))
    torch.library.opcheck(torch.ops.rlmegatron.copy_segments.default, arguments, test_utils=("test_schema",))


@pytest.fixture
def fresh_libraries() -> Iterator[None]:
    segments._library.cache_clear()
    yield
    segments._library.cache_clear()


@pytest.mark.parametrize("change", ["missing", "other interface"])
def test_without_a_library_torch_copies_and_one_warning_says_so(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_libraries: None
) -> None:
    if change == "missing":
        monkeypatch.setattr(segments, "CSRC", tmp_path)
    else:
        monkeypatch.setattr(segments, "INTERFACE", segments.INTERFACE + 1)
    source, destination = torch.arange(9.0), torch.zeros(12)
    table = SegmentTable.of(table_of(GOOD), [source], [destination])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copy_segments(table, [source], [destination])
        copy_segments(table, [source], [destination])
    assert destination.tolist() == [0, 2, 3, 4, 6, 7, 8, 0, 0, 0, 0, 0]
    assert [str(warning.message) for warning in caught if "pip install" in str(warning.message)] == [
        str(warning.message) for warning in caught
    ]
    assert len(caught) == 1


@pytest.mark.parametrize(("device", "tools"), [("cpu", ("c++", "g++", "clang++")), ("cuda", ("nvcc",))])
def test_the_library_is_built_where_its_compiler_is_found(device: str, tools: tuple[str, ...]) -> None:
    if not any(map(shutil.which, tools)):
        pytest.skip(f"none of {', '.join(tools)} is installed")
    assert segments.is_built(device), "install the package again: pip install --no-deps --no-build-isolation -e ."


@pytest.mark.parametrize(
    ("rows", "merged"),
    [
        ([[0, 8, 4, 0, 0, 4, 3, 4]], [[0, 8, 12, 0, 0, 12, 1, 12]]),
        ([[0, 8, 6, 0, 0, 4, 3, 4]], [[0, 8, 6, 0, 0, 4, 3, 4]]),
        ([[0, 3, 9, 0, 5, 9, 1, 2], [0, 0, 7, 0, 2, 7, 1, 3]], [[0, 0, 5, 0, 2, 5, 1, 5]]),
        ([[0, 0, 9, 0, 0, 7, 2, 3], [0, 3, 9, 0, 3, 7, 2, 2]], [[0, 0, 9, 0, 0, 7, 2, 5]]),
        ([[0, 0, 9, 0, 0, 7, 2, 3], [0, 18, 9, 0, 14, 7, 4, 3]], [[0, 0, 9, 0, 0, 7, 6, 3]]),
        ([[0, 0, 4, 0, 0, 4, 2, 2], [0, 2, 4, 0, 2, 4, 2, 2]], [[0, 0, 8, 0, 0, 8, 1, 8]]),
        ([[0, 0, 2, 0, 0, 2, 1, 2], [1, 2, 2, 0, 2, 2, 1, 2]], [[0, 0, 2, 0, 0, 2, 1, 2], [1, 2, 2, 0, 2, 2, 1, 2]]),
        ([[0, 0, 2, 0, 0, 2, 0, 2], [0, 0, 2, 0, 0, 2, 2, 0]], []),
    ],
    ids=[
        "gapless rows",
        "gaps",
        "one behind the other",
        "side by side",
        "below",
        "until gapless",
        "two sources",
        "empty",
    ],
)
def test_neighbours_are_merged(rows: list[list[int]], merged: list[list[int]]) -> None:
    table = table_of(*rows)
    before = table.copy()
    assert merge_segments(table).tolist() == merged
    assert np.array_equal(table, before)


@given(case=cases())
@settings(deadline=None, max_examples=60)
def test_a_merged_table_copies_the_same(case: Case) -> None:
    whole, merged = case.poisoned(), case.poisoned()
    copy_slowly(case.table, whole.sources, whole.destinations)
    table = merge_segments(case.table)
    assert len(table) <= len(case.table)
    check_segments(table, merged.sources, merged.destinations)
    copy_slowly(table, merged.sources, merged.destinations)
    assert all(np.array_equal(one, other) for one, other in zip(whole.bits(), merged.bits(), strict=True))


@pytest.mark.parametrize("start", range(18))
@pytest.mark.parametrize("columns", [1023, 1024, 1087, 1088, 1151, 5000])
def test_long_rows_are_whole_at_any_alignment(start: int, columns: int) -> None:
    """Those are written past the caches, in blocks that begin at a multiple of 16 bytes."""
    source = torch.randint(-128, 128, (3 * 6000,), dtype=torch.int8)
    destination = torch.zeros(3 * 6001 + 64, dtype=torch.int8)
    expected = destination.clone()
    for row in range(3):
        first = start + row * 6001
        expected[first : first + columns] = source[7 + row * 6000 : 7 + row * 6000 + columns]
    table = np.array([[0, 7, 6000, 0, start, 6001, 3, columns]], dtype=np.int64)
    copy_segments(SegmentTable.of(table, [source], [destination]), [source], [destination])
    assert torch.equal(destination, expected)
