"""Rows of a JSONL or Parquet file by index, with the file's fingerprint and errors that name the line.

In: a path. Out: `Rows`, whose items are dicts of plain values, or the first row alone. Must never import torch or a
tokenizer, nor pyarrow before a Parquet file is opened: it is slow to load, and the check of a config reads rows too.

Plain is what JSON has (null, booleans, numbers, text, lists and dicts) and, in Parquet only, bytes.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

from rlmegatron.config.file_names import JSON_LINES_SUFFIXES, suffix_of
from rlmegatron.data.file_content import HEAD_BYTES, wrong_content

_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be unchanged for a file's rows to be the same rows."""

    num_bytes: int
    sha256: str


class Rows(Protocol):
    """The rows of one file; an item is read when it is asked for."""

    path: str
    fingerprint: Fingerprint

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row of plain values by its position from 0; raises ValueError that names the line if it is unreadable."""

    def where(self, index: int) -> str:
        """'data/train.jsonl line 17' or 'data/train.parquet row 17', counted from 1."""


class JsonlRows:
    """One JSON object per line. Blank lines are skipped; opening reads the file once and keeps only line offsets."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._offsets = array("q")
        self._line_numbers = array("q")
        self._file = open(path, "rb")  # noqa: SIM115 (rows are read from it as long as this object lives)
        digest, offset = hashlib.sha256(), 0
        for number, line in enumerate(self._file, start=1):
            digest.update(line)
            if not _is_blank(line):
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)
        self.fingerprint = Fingerprint(offset, digest.hexdigest())

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(self._offsets[index])
        return _parse_line(self._file.readline(), where=self.where(index))

    def where(self, index: int) -> str:
        return _line_of(self.path, self._line_numbers[index])


class ParquetRows:
    """The rows of a table, which is held in memory in its columnar form; a row becomes Python values on access."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        self.fingerprint = Fingerprint(os.path.getsize(path), digest.hexdigest())
        self._table = _open_parquet(path, lambda parquet: parquet.ParquetFile(path, memory_map=True).read())

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _plain_row(self._table, index, where=self.where(index))

    def where(self, index: int) -> str:
        return _row_of(self.path, index)


def open_rows(path: str) -> Rows:
    """The rows of a JSONL (.jsonl, .ndjson, .json) or Parquet (.parquet, .pq) file.

    Raises ValueError for a missing or unreadable file, another suffix, content of another kind, and a file without
    rows.
    """
    is_jsonl = suffix_of(path) in JSON_LINES_SUFFIXES
    with _named_errors(path):
        _refuse_wrong_content(path, is_jsonl=is_jsonl)
        rows: Rows = JsonlRows(path) if is_jsonl else ParquetRows(path)
    if len(rows) == 0:
        raise ValueError(f"{path}: has no rows")
    return rows


def first_row(path: str) -> tuple[str, dict[str, Any]]:
    """Where the first row of a file stands, and the row, as `open_rows` would give them; reads little beyond it.

    Raises ValueError where `open_rows` or reading the row would.
    """
    is_jsonl = suffix_of(path) in JSON_LINES_SUFFIXES
    with _named_errors(path):
        _refuse_wrong_content(path, is_jsonl=is_jsonl)
        found = _first_of_jsonl(path) if is_jsonl else _first_of_parquet(path)
    if found is None:
        raise ValueError(f"{path}: has no rows")
    return found


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Errors of the system as ValueError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file (working directory {os.getcwd()})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _refuse_wrong_content(path: str, *, is_jsonl: bool) -> None:
    with open(path, "rb") as file:
        reason = wrong_content(file.read(HEAD_BYTES), is_jsonl=is_jsonl)
    if reason is not None:
        raise ValueError(f"{path}: {reason}")


def _first_of_jsonl(path: str) -> tuple[str, dict[str, Any]] | None:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not _is_blank(line):
                where = _line_of(path, number)
                return where, _parse_line(line, where=where)
    return None


def _first_of_parquet(path: str) -> tuple[str, dict[str, Any]] | None:
    with open(path, "rb") as file:
        batch = _open_parquet(path, lambda parquet: next(parquet.ParquetFile(file).iter_batches(batch_size=1), None))
    if not batch:
        return None
    where = _row_of(path, 0)
    return where, _plain_row(batch, 0, where=where)


def _open_parquet(path: str, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of the module pyarrow.parquet; raises ValueError for a file that is none."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: Parquet files need the package 'pyarrow' ({error}): pip install pyarrow") from None
    try:
        return read(pyarrow.parquet)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from None
    except pyarrow.ArrowException as error:  # such as a compression that this build of pyarrow does not have
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _plain_row(table: Any, index: int, *, where: str) -> dict[str, Any]:
    """One row of a pyarrow table or batch; raises ValueError that names the column whose cell cannot be read."""
    row: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name in row:
            raise ValueError(f"{where}: two columns are named {name!r}")
        try:
            row[name] = _plain(column[index].as_py())
        except Exception as error:  # Python has no such date, a time zone is unknown, text is not UTF-8, and so on
            raise ValueError(f"{where}, column {name!r}: cannot be read: {error}") from None
    return row


def _plain(value: Any) -> Any:
    """A cell as JSON would hold it.

    A decimal number is an int if it is whole, else the nearest float. Dates and times are ISO 8601 text, and durations
    seconds. A map is a list of [key, value]. What else Arrow knows, such as UUIDs, is its text.
    """
    if value is None or isinstance(value, str | bool | int | float | bytes):
        return value
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.total_seconds() if isinstance(value, datetime.timedelta) else str(value)


def _is_blank(line: bytes) -> bool:
    return not line.strip(_UTF8_BOM + b" \t\r\n")


def _parse_line(line: bytes, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(_UTF8_BOM))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError(f"{where}: cannot be read: its lists and objects are nested too deeply") from None
    except ValueError:  # the one thing left that json refuses
        limit = sys.get_int_max_str_digits()
        raise ValueError(f"{where}: cannot be read: it holds a whole number of more than {limit} digits") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: holds a {type(row).__name__}, must be one JSON object per line")
    return row


def _line_of(path: str, number: int) -> str:
    return f"{path} line {number}"


def _row_of(path: str, index: int) -> str:
    return f"{path} row {index + 1}"


def prompt_of(row: Mapping[str, Any], *, key: str, where: str) -> str | list[dict[str, Any]]:
    """The prompt in a row: a string, or chat messages of at least 'role' and 'content', both strings.

    Raises ValueError that names the line, what is there, and what is allowed.
    """
    if key not in row:
        found = ", ".join(repr(name) for name in row) or "no field at all"
        raise ValueError(f"{where}: no field {key!r}; it has {found} (set data.prompt_key)")
    prompt = row[key]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"{where}: {key!r} is {_describe(prompt)}, must be a string or a list of messages with 'role' and 'content'"
        )
    for position, message in enumerate(prompt):
        _check_message(message, where=f"{where}: {key}[{position}]")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the last message of {key!r} is the assistant's; a prompt must end before")
    return prompt


def _check_message(message: object, *, where: str) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_describe(message)}, must be a message with 'role' and 'content'")
    for name in ("role", "content"):
        if name not in message:
            raise ValueError(f"{where} has no {name!r}; it has {', '.join(map(repr, message)) or 'nothing'}")
        if not isinstance(message[name], str):
            raise ValueError(f"{where}.{name} is {_describe(message[name])}, must be a string")


def _describe(value: object) -> str:
    if value is None:
        return "null"
    return "an empty list" if value == [] else f"{value!r:.60} ({type(value).__name__})"
