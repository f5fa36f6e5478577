"""Rows of a JSONL or Parquet file by index, with the file's fingerprint and errors that name the line.

In: a path. Out: `Rows`, whose items are dicts of plain values. Must never import torch or a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rlmegatron.config.file_names import JSON_LINES_SUFFIXES, suffix_of

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
        """One row by its position from 0; raises ValueError that names the line if it cannot be read."""

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
            if line.strip(_UTF8_BOM + b" \t\r\n"):
                self._offsets.append(offset)
                self._line_numbers.append(number)
            offset += len(line)
        self.fingerprint = Fingerprint(offset, digest.hexdigest())

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(self._offsets[index])
        line = self._file.readline().removeprefix(_UTF8_BOM)
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.where(index)}: not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where(index)}: not UTF-8: {error.reason} at byte {error.start}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(index)}: holds a {type(row).__name__}, must be one JSON object per line")
        return row

    def where(self, index: int) -> str:
        return f"{self.path} line {self._line_numbers[index]}"


class ParquetRows:
    """The rows of a table, which is held in memory in its columnar form; a row becomes Python values on access."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        self.fingerprint = Fingerprint(os.path.getsize(path), digest.hexdigest())
        try:
            self._table = pq.read_table(path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a Parquet file: {error}") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: self._table.column(name)[index].as_py() for name in self._table.column_names}

    def where(self, index: int) -> str:
        return f"{self.path} row {index + 1}"


def open_rows(path: str) -> Rows:
    """The rows of a JSONL (.jsonl, .ndjson, .json) or Parquet (.parquet, .pq) file.

    Raises ValueError for a missing or unreadable file, another suffix, and a file without rows.
    """
    suffix = suffix_of(path)
    try:
        rows: Rows = JsonlRows(path) if suffix in JSON_LINES_SUFFIXES else ParquetRows(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file (working directory {os.getcwd()})") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if len(rows) == 0:
        raise ValueError(f"{path}: has no rows")
    return rows


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
