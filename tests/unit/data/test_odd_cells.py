"""Cells that JSON has no value for: made plain where there is a right way, else an error that names the place."""

from __future__ import annotations

import datetime
import json
import re
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmegatron.data.source import first_row, open_rows

FAR = 2**31 - 1
"""Days after 1970; Python's dates end in the year 9999."""


def by_index(path: str) -> dict[str, Any]:
    return open_rows(path)[0]


def alone(path: str) -> dict[str, Any]:
    return first_row(path)[1]


BOTH = pytest.mark.parametrize("read", [by_index, alone])


def table_of(tmp_path: Path, column: pa.Array) -> str:
    path = str(tmp_path / "rows.parquet")
    pq.write_table(pa.table({"prompt": ["q"] * len(column), "cell": column}), path)
    return path


def undecodable_text() -> pa.Array:
    return pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])


@BOTH
@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([FAR], pa.date32()), "days="),
        (pa.array([2**62], pa.timestamp("us")), ""),
        (pa.array([1], pa.timestamp("us", tz="Mars/Base")), ""),
        (undecodable_text(), "'utf-8' codec can't decode byte 0xff"),
        (pa.array([{"deep": [FAR]}], pa.struct([("deep", pa.list_(pa.date32()))])), "days="),
    ],
)
def test_a_cell_that_python_cannot_hold_is_named(
    tmp_path: Path, read: Callable[[str], object], column: pa.Array, reason: str
) -> None:
    path = table_of(tmp_path, column)
    with pytest.raises(ValueError, match=re.escape(f"{path} row 1, column 'cell': cannot be read: {reason}")) as caught:
        read(path)
    assert type(caught.value) is ValueError


def test_only_the_row_with_the_odd_cell_fails(tmp_path: Path) -> None:
    rows = open_rows(table_of(tmp_path, pa.array([0, FAR], pa.date32())))
    assert rows[0] == {"prompt": "q", "cell": "1970-01-01"}
    with pytest.raises(ValueError, match="row 2, column 'cell': cannot be read: "):
        rows[1]


@BOTH
def test_nanoseconds_that_python_cannot_hold_are_named(tmp_path: Path, read: Callable[[str], dict[str, Any]]) -> None:
    """With pandas installed, pyarrow gives its Timestamp, whose text has all nine digits."""
    path = table_of(tmp_path, pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")))
    try:
        assert read(path)["cell"] == "2023-11-14T22:13:20.123456789"
    except ValueError as error:
        assert str(error).startswith(f"{path} row 1, column 'cell': cannot be read: Nanosecond resolution")
        assert "pandas" not in sys.modules


@BOTH
@pytest.mark.parametrize(
    ("column", "plain"),
    [
        (pa.array([Decimal("2.50")]), 2.5),
        (pa.array([Decimal("7.00")]), 7),
        (pa.array([Decimal(2**100)]), 2**100),
        (pa.array([datetime.date(2024, 2, 29)]), "2024-02-29"),
        (pa.array([datetime.datetime(2024, 2, 29, 13, 5)], pa.timestamp("us")), "2024-02-29T13:05:00"),
        (pa.array([datetime.time(13, 5)]), "13:05:00"),
        (pa.array([datetime.timedelta(seconds=1.5)]), 1.5),
        (pa.array([[Decimal("0.5")]]), [0.5]),
        (pa.array([{"day": datetime.date(2024, 2, 29), "n": None}]), {"day": "2024-02-29", "n": None}),
        (pa.array([[("a", Decimal("1"))]], pa.map_(pa.string(), pa.decimal128(3, 0))), [["a", 1]]),
        (pa.array([uuid.UUID(int=1).bytes], pa.uuid()), "00000000-0000-0000-0000-000000000001"),
        (pa.array([True]), True),
        (pa.array([b"ab"]), b"ab"),
    ],
)
def test_cells_are_plain(
    tmp_path: Path, read: Callable[[str], dict[str, Any]], column: pa.Array, plain: object
) -> None:
    cell = read(table_of(tmp_path, column))["cell"]
    assert (cell, type(cell)) == (plain, type(plain))


@BOTH
def test_two_columns_of_one_name_are_named(tmp_path: Path, read: Callable[[str], object]) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    with pytest.raises(ValueError, match=re.escape(f"{path} row 1: two columns are named 'prompt'")):
        read(str(path))


@BOTH
@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "its lists and objects are nested too deeply"),
        ("9" * 5000, f"it holds a whole number of more than {sys.get_int_max_str_digits()} digits"),
    ],
)
def test_json_that_python_cannot_hold_is_named(
    tmp_path: Path, read: Callable[[str], object], cell: str, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'\n{{"prompt": "q", "cell": {cell}}}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path} line 2: cannot be read: {reason}")):
        read(str(path))


def test_plain_rows_can_be_written_as_json(tmp_path: Path) -> None:
    row = by_index(table_of(tmp_path, pa.array([{"a": Decimal("2.50"), "b": [datetime.date(2024, 2, 29)]}])))
    assert json.dumps(row) == '{"prompt": "q", "cell": {"a": 2.5, "b": ["2024-02-29"]}}'
