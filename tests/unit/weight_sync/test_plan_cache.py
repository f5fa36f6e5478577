"""Plans are kept under what they follow from, and a file that says otherwise is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from rlmegatron.weight_sync import plan_cache
from rlmegatron.weight_sync.plan import Pieces
from rlmegatron.weight_sync.plan_cache import Plan, find_plan


def plan(start: int) -> Plan:
    columns = (np.arange(start + number, start + number + 3) for number in range(len(fields(Pieces))))
    return Plan(Pieces(*columns), np.array([start]))


def never() -> Plan:
    raise AssertionError("it was there")


def assert_same(found: Plan, expected: Plan) -> None:
    assert np.array_equal(found.padded, expected.padded)
    for field in fields(Pieces):
        assert np.array_equal(getattr(found.pieces, field.name), getattr(expected.pieces, field.name)), field.name


def test_a_plan_is_computed_once(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "reshard"
    assert_same(find_plan(directory, ("tp", 8), lambda: plan(1)), plan(1))
    assert_same(find_plan(directory, ("tp", 8), never), plan(1))
    assert [path.suffix for path in directory.iterdir()] == [".npz"]


def test_other_facts_make_another_plan(tmp_path: Path) -> None:
    find_plan(tmp_path, ("tp", 8), lambda: plan(1))
    assert_same(find_plan(tmp_path, ("tp", 4), lambda: plan(2)), plan(2))
    assert_same(find_plan(tmp_path, ("tp", 8), never), plan(1))


def test_other_code_makes_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_plan(tmp_path, ("tp", 8), lambda: plan(1))
    monkeypatch.setattr(plan_cache, "_sources", lambda: "another version")
    assert_same(find_plan(tmp_path, ("tp", 8), lambda: plan(2)), plan(2))


def test_without_a_directory_nothing_is_kept() -> None:
    find_plan(None, ("tp", 8), lambda: plan(1))
    assert_same(find_plan(None, ("tp", 8), lambda: plan(2)), plan(2))


def test_a_plan_of_another_layout_is_refused(tmp_path: Path) -> None:
    find_plan(tmp_path, ("tp", 8), lambda: plan(1))
    (first,) = tmp_path.iterdir()
    find_plan(tmp_path, ("tp", 4), lambda: plan(2))
    (second,) = set(tmp_path.iterdir()) - {first}
    first.replace(second)
    with pytest.raises(ValueError, match=rf"{second}: this plan was made for another layout; remove the file"):
        find_plan(tmp_path, ("tp", 4), never)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half a file", b"not an archive at all"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    find_plan(tmp_path, ("tp", 8), lambda: plan(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}: not a whole plan; remove the file"):
        find_plan(tmp_path, ("tp", 8), never)


def test_a_file_without_all_columns_is_refused(tmp_path: Path) -> None:
    find_plan(tmp_path, ("tp", 8), lambda: plan(1))
    (path,) = tmp_path.iterdir()
    with np.load(path) as content:
        key = str(content["key"])
    np.savez(path, key=np.array(key))
    with pytest.raises(ValueError, match=rf"{path}: not a whole plan; remove the file"):
        find_plan(tmp_path, ("tp", 8), never)


def test_a_place_where_nothing_can_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "reshard").write_text("")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'reshard'}: no plan can be kept there \(File exists\)"):
        find_plan(tmp_path / "reshard", ("tp", 8), lambda: plan(1))


def test_ranks_that_keep_one_plan_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Processes of different nodes can have the same number."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: find_plan(tmp_path, ("tp", 8), lambda: plan(1)), range(64)))
    for one in found:
        assert_same(one, plan(1))
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]
