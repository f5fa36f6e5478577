"""The first row of a file shows the mistakes that all rows have, in JSONL and in Parquet, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlmegatron.data.first_rows import first_rows
from rlmegatron.data.source import first_row, open_rows

MESSAGE = {"role": "user", "content": "1="}


def write(directory: Path, rows: list[dict[str, Any]], *, suffix: str) -> str:
    path = directory / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problem(path: str) -> str:
    _, problems = first_rows([path], prompt_key="prompt")
    (line,) = problems
    return line


@pytest.mark.parametrize(("suffix", "place"), [(".jsonl", "line 1"), (".parquet", "row 1")])
def test_first_rows_of_both_kinds_are_those_that_a_run_reads(tmp_path: Path, suffix: str, place: str) -> None:
    data = [{"prompt": [MESSAGE], "reward_model": {"ground_truth": "2", "style": "rule"}, "n": i} for i in range(5)]
    path = write(tmp_path, data, suffix=suffix)
    assert first_rows([path], prompt_key="prompt") == ({f"{path} {place}": data[0]}, [])
    rows = open_rows(path)
    assert first_row(path) == (rows.where(0), rows[0])


@pytest.mark.parametrize(("suffix", "place"), [(".jsonl", "line 1"), (".parquet", "row 1")])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "answer": 1}, "no field 'prompt'; it has 'question', 'answer' (set data.prompt_key)"),
        ({"prompt": 3}, "'prompt' is 3 (int), must be a string or a list of messages with 'role' and 'content'"),
    ],
)
def test_a_row_without_a_prompt_is_named_in_the_words_of_the_reader(
    tmp_path: Path, suffix: str, place: str, row: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path, [row], suffix=suffix)
    assert problem(path) == f"{path} {place}: {expected}"


def test_a_message_without_content_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": [{"role": "user", "text": "1="}]}], suffix=".jsonl")
    assert problem(path) == f"{path} line 1: prompt[0] has no 'content'; it has 'role', 'text'"
    path = write(tmp_path, [{"prompt": [{"role": "user", "content": None}]}], suffix=".parquet")
    assert problem(path) == f"{path} row 1: prompt[0].content is null, must be a string"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'\xef\xbb\xbf\n\n{"question": "q"}\n', " line 3: no field 'prompt'; it has 'question' (set data.prompt_key)"),
        (b'"[1]"\n', " line 1: holds a str, must be one JSON object per line"),
        (b"\n\nprompt\n", " line 3: not JSON: Expecting value at column 1"),
        (b"\n \n", ": has no rows"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, text: bytes, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    assert problem(str(path)) == f"{path}{expected}"


def test_a_table_without_rows_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    assert problem(str(empty)) == f"{empty}: has no rows"


@pytest.mark.parametrize(("suffix", "place"), [(".jsonl", "line 1"), (".parquet", "row 1")])
def test_messages_are_no_prompt_without_the_chat_template(tmp_path: Path, suffix: str, place: str) -> None:
    path = write(tmp_path, [{"prompt": [MESSAGE], "answer": "2"}], suffix=suffix)
    rows, problems = first_rows([path], prompt_key="prompt", chat_template=False)
    assert problems == [
        f"{path} {place}: the prompt is a list of chat messages, which need data.chat_template: true",
    ]
    assert rows == {f"{path} {place}": {"prompt": [MESSAGE], "answer": "2"}}
    assert first_rows([path], prompt_key="prompt", chat_template=True)[1] == []
    path = write(tmp_path, [{"prompt": "1="}], suffix=suffix)
    assert first_rows([path], prompt_key="prompt", chat_template=False)[1] == []


def test_all_files_are_looked_at_and_a_row_without_a_prompt_is_still_returned(tmp_path: Path) -> None:
    broken, sound = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    broken.write_text('{"question": "q"}\n')
    sound.write_text('{"prompt": "1="}\nnot looked at\n')
    rows, problems = first_rows([str(broken), str(tmp_path / "gone.jsonl"), str(sound)], prompt_key="prompt")
    assert rows == {f"{broken} line 1": {"question": "q"}, f"{sound} line 1": {"prompt": "1="}}
    assert [line.partition(": ")[0] for line in problems] == [f"{broken} line 1", str(tmp_path / "gone.jsonl")]


def test_looking_at_jsonl_loads_neither_pyarrow_nor_numpy_and_needs_neither(tmp_path: Path) -> None:
    path, table = (write(tmp_path, [{"prompt": "1="}], suffix=suffix) for suffix in (".jsonl", ".parquet"))
    code = (
        "import sys; sys.modules['pyarrow'] = sys.modules['numpy'] = None\n"
        "from rlmegatron.data.first_rows import first_rows\n"
        "from rlmegatron.data.source import open_rows\n"
        f"print(len(open_rows({path!r})), first_rows([{path!r}, {table!r}], prompt_key='x'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 ({")
    assert "rows.parquet: Parquet files need the package 'pyarrow'" in done.stdout
