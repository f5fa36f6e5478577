"""metrics.jsonl holds every step once, also over crashes and resumes."""

import json
import math

import pytest

from rlmegatron.metrics.jsonl import JsonlSink


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, steps, resumed_from=None, close=True, **metrics):
    sink = JsonlSink(path, resumed_from=resumed_from)
    for step in steps:
        sink.write(step, metrics or {"x": step / 10})
    if close:
        sink.close()


def test_a_row_is_readable_before_the_sink_is_closed(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path, resumed_from=None)
    sink.write(1, {"reward/mean": 0.25})
    assert rows(path) == [{"step": 1, "reward/mean": 0.25}]
    sink.close()
    sink.close()


def test_numbers_that_json_lacks_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1], a=math.nan, b=math.inf, c=-math.inf, d=1e-300)
    assert rows(path) == [{"step": 1, "a": None, "b": None, "c": None, "d": 1e-300}]
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_a_resumed_run_repeats_no_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [0, 1, 2, 2, 3, 4])
    write(path, [3, 4, 5], resumed_from=2)
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 2, 3, 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_last_line_is_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 2, "x"')
    write(path, [3], resumed_from=2)
    assert [row["step"] for row in rows(path)] == [1, 2, 3]


@pytest.mark.parametrize("line", ["rubbish", "[]", '{"x": 1}', '{"step": "1"}', "3"])
def test_a_row_that_is_none_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2: "):
        JsonlSink(path, resumed_from=5)
    assert path.read_text().count("\n") == 3


def test_a_fresh_run_keeps_the_file_it_finds_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    write(path, [1])
    assert [row["step"] for row in rows(path)] == [1]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl.bak")] == [1, 2]


def test_a_crash_while_truncating_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])
    before = path.read_text()

    def crash(*_):
        raise OSError("power cut")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="power cut"):
        JsonlSink(path, resumed_from=1)
    assert path.read_text() == before
