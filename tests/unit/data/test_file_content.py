"""A file that is not what its name says is told what it is and what to do, by both readers alike."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmegatron.data.file_content import wrong_content
from rlmegatron.data.source import first_row, open_rows

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "ä", "answer": "3"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
ARRAY = "is a JSON array; write one object per line (.jsonl)"


def parquet() -> bytes:
    pq.write_table(pa.Table.from_pylist(ROWS), buffer := io.BytesIO())
    return buffer.getvalue()


def zipped() -> bytes:
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("rows.jsonl", LINES)
    return buffer.getvalue()


def without_content(value: object) -> str:
    """Compressed bytes hold the time of day, and all processes that run tests must name them alike."""
    return type(value).__name__ if isinstance(value, bytes) else str(value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", gzip.compress(LINES.encode()), "is compressed with gzip; unpack it first"),
        ("a.parquet", gzip.compress(LINES.encode()), "is compressed with gzip; unpack it first"),
        ("a.jsonl", bz2.compress(LINES.encode()), "is compressed with bzip2; unpack it first"),
        ("a.jsonl", lzma.compress(LINES.encode()), "is compressed with xz; unpack it first"),
        ("a.jsonl", bytes(pa.compress(LINES.encode(), codec="zstd")), "is compressed with zstd; unpack it first"),
        ("a.jsonl", zipped(), "is compressed with zip; unpack it first"),
        ("a.jsonl", LINES.encode("utf-16"), "is UTF-16; write it as UTF-8"),
        ("a.jsonl", b"\xfe\xff" + LINES.encode("utf-16-be"), "is UTF-16; write it as UTF-8"),
        ("a.jsonl", LINES.encode("utf-16-le"), "is UTF-16; write it as UTF-8"),
        ("a.jsonl", LINES.encode("utf-32"), "is UTF-32; write it as UTF-8"),
        ("a.json", json.dumps(ROWS).encode(), ARRAY),
        ("a.json", json.dumps(ROWS, indent=2).encode(), ARRAY),
        ("a.jsonl", b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=2).encode(), ARRAY),
        ("a.parquet", json.dumps(ROWS, indent=2).encode(), ARRAY),
        (
            "a.json",
            json.dumps(ROWS[0], indent=2).encode(),
            "is a JSON object over several lines; write one object per line (.jsonl)",
        ),
        ("a.parquet", LINES.encode(), "is no Parquet file but looks like JSON lines; name it .jsonl"),
        ("a.jsonl", parquet(), "is a Parquet file; name it .parquet"),
    ],
    ids=without_content,
)
def test_content_of_another_kind_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for read in (first_row, open_rows):
        with pytest.raises(ValueError) as caught:
            read(str(path))
        assert str(caught.value) == f"{path}: {reason}"


@pytest.mark.parametrize(
    ("head", "is_jsonl"),
    [
        (LINES.encode(), True),
        (b"\xef\xbb\xbf\n \r\n" + LINES.encode(), True),
        (b'{"prompt": "\xff"}\n', True),
        (b'{"prompt": "' + "ä".encode()[:1], True),
        (b"{", True),
        (b"", True),
        (b"prompt,answer\n", True),
        (bytes(100), True),
        (parquet()[:4096], False),
        (b"", False),
        (b"prompt,answer\n", False),
    ],
    ids=without_content,
)
def test_what_may_be_right_or_is_broken_in_another_way_is_left_to_the_reader(head: bytes, is_jsonl: bool) -> None:
    assert wrong_content(head, is_jsonl=is_jsonl) is None
