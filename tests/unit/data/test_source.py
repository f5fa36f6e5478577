"""Reading rows: what is right comes back as written, what is wrong is one error that names the line."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmegatron.data.source import open_rows, prompt_of


def write(tmp_path: Path, content: bytes, name: str = "train.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def test_jsonl_rows_come_back_in_any_order_and_keep_their_line_numbers(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"prompt": "one"}\n\n  \n{"prompt": "zwei \xc3\xa4", "n": [1, null]}\r\n{"prompt": "three"}'
    path = write(tmp_path, content)
    rows = open_rows(path)
    assert len(rows) == 3
    assert [rows[i] for i in (2, 0, 1)] == [
        {"prompt": "three"},
        {"prompt": "one"},
        {"prompt": "zwei ä", "n": [1, None]},
    ]
    assert [rows.where(i) for i in range(3)] == [f"{path} line 1", f"{path} line 4", f"{path} line 5"]
    assert (rows.fingerprint.num_bytes, rows.fingerprint.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_parquet_rows_equal_the_table(tmp_path: Path) -> None:
    data = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": i} for i in range(10)]
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(data), path, row_group_size=3)
    rows = open_rows(path)
    assert len(rows) == 10
    assert [rows[i] for i in range(10)] == data
    assert rows.where(0) == f"{path} row 1"
    assert rows.fingerprint.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("content", "index", "message"),
    [
        (b'{"a": 1}\n{"a": \n', 1, "train.jsonl line 2: not JSON: Expecting value at column"),
        (b'{"a": 1}\n\n[1, 2]\n', 1, "train.jsonl line 3: holds a list, must be one JSON object per line"),
        (b'{"a": "\xff"}\n', 0, "train.jsonl line 1: not UTF-8: invalid start byte at byte 7"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, content: bytes, index: int, message: str) -> None:
    rows = open_rows(write(tmp_path, content))
    with pytest.raises(ValueError, match=re.escape(message)):
        rows[index]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.jsonl: no such file \(working directory /"):
        open_rows("nowhere.jsonl")
    with pytest.raises(ValueError, match="empty.jsonl: has no rows"):
        open_rows(write(tmp_path, b"\n \n", "empty.jsonl"))
    with pytest.raises(ValueError, match=r"data.csv is of an unknown kind; use a file that ends in .jsonl, "):
        open_rows(write(tmp_path, b"a,b\n", "data.csv"))
    with pytest.raises(ValueError, match="bad.parquet: not a Parquet file"):
        open_rows(write(tmp_path, b"no parquet", "bad.parquet"))
    with pytest.raises(ValueError, match="folder.jsonl: cannot be read: Is a directory"):
        (tmp_path / "folder.jsonl").mkdir()
        open_rows(str(tmp_path / "folder.jsonl"))


MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a"}, "no field 'prompt'; it has 'question', 'answer' (set data.prompt_key)"),
        ({}, "no field 'prompt'; it has no field at all"),
        ({"prompt": None}, "'prompt' is null, must be a string or a list of messages"),
        ({"prompt": 3}, "'prompt' is 3 (int), must be"),
        ({"prompt": []}, "'prompt' is an empty list, must be"),
        ({"prompt": ["hi"]}, "prompt[0] is 'hi' (str), must be a message with 'role' and 'content'"),
        ({"prompt": [MESSAGE, {"role": "user"}]}, "prompt[1] has no 'content'; it has 'role'"),
        ({"prompt": [{**MESSAGE, "content": None}]}, "prompt[0].content is null, must be a string"),
        (
            {"prompt": [MESSAGE, {"role": "assistant", "content": "x"}]},
            "the last message of 'prompt' is the assistant's",
        ),
    ],
)
def test_a_wrong_prompt_says_what_is_there_and_what_is_allowed(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        prompt_of(row, key="prompt", where="f.jsonl line 17")
    assert str(caught.value).startswith("f.jsonl line 17: ")


def test_strings_and_messages_are_prompts() -> None:
    assert prompt_of({"q": "hi"}, key="q", where="f") == "hi"
    assert prompt_of({"prompt": [MESSAGE]}, key="prompt", where="f") == [MESSAGE]
