"""Files a config names: missing, empty and wrong ones, and run directories that cannot be written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config.load import load
from rlmegatron.config.paths import path_problems, usable_data_files

MakeConfig = Callable[..., Path]


def test_sound_paths_have_no_problems_and_nothing_is_created(make_config: MakeConfig, tmp_path: Path) -> None:
    cfg = load(make_config())
    assert path_problems(cfg) == []
    assert not (tmp_path / "runs").exists()


def test_every_missing_or_unusable_data_file_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    path = make_config()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "dir.jsonl").mkdir()
    (tmp_path / "x.csv").write_text("a")
    names = ("gone.jsonl", "dir.jsonl", "x.csv")
    sources = ", ".join(f"{{path: {tmp_path / name}}}" for name in names)
    cfg = load(path, [f"data.train=[{sources}]", f"eval.sets.test={tmp_path / 'empty.jsonl'}"])
    assert path_problems(cfg) == [
        f"data.train[0].path: {tmp_path / 'gone.jsonl'} does not exist (looked in {Path.cwd()}); use a file",
        f"data.train[1].path: {tmp_path / 'dir.jsonl'} is a directory; use a file",
        f"data.train[2].path: {tmp_path / 'x.csv'} is of an unknown kind; "
        "use a file that ends in .jsonl, .ndjson, .json, .parquet, .pq",
        f"eval.sets.test: {tmp_path / 'empty.jsonl'} is empty",
    ]


def test_the_files_that_can_be_read_are_given_once_for_their_rows_to_be_looked_at(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"what it holds is not looked at here")
    (tmp_path / "empty.jsonl").touch()
    changes = {"eval.sets": {"same": str(train), "table": str(table), "empty": str(tmp_path / "empty.jsonl")}}
    cfg = load(make_config(changes))
    assert usable_data_files(cfg) == [str(train), str(table)]


def test_a_run_directory_that_is_a_file_or_below_one_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    blocker = tmp_path / "blocker"
    blocker.touch()
    path = make_config()
    assert path_problems(load(path, [f"run_dir={blocker}"])) == [
        f"run_dir: the run directory {blocker} is a file; use a directory"
    ]
    assert path_problems(load(path, [f"run_dir={blocker}/a/b"])) == [
        f"run_dir: the run directory {blocker}/a/b cannot be made, because {blocker} is a file; use a directory"
    ]


def test_a_run_directory_that_cannot_be_written_is_refused(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load(make_config(), [f"run_dir={tmp_path / 'closed' / 'run'}"])
    (tmp_path / "closed").mkdir()
    access = os.access
    # The superuser may write anywhere, so a mode bit would not show this.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and access(path, mode))
    assert path_problems(cfg) == [
        f"run_dir: the run directory {tmp_path / 'closed' / 'run'} cannot be written "
        f"({tmp_path / 'closed'} is not writable)"
    ]


LONG = "x" * 300
"""Longer than any file system takes; as a path that the user may not enter, it cannot be looked at."""


def test_a_path_that_cannot_be_looked_at_is_a_problem_of_its_key(make_config: MakeConfig, tmp_path: Path) -> None:
    overrides = [f"data.train=[{{path: {LONG}.jsonl}}]", f"eval.sets.test={LONG}/a.jsonl", f"run_dir={tmp_path}/{LONG}"]
    cfg = load(make_config(), overrides)
    assert path_problems(cfg) == [
        f"data.train[0].path: {LONG}.jsonl cannot be looked at: File name too long",
        f"eval.sets.test: {LONG}/a.jsonl cannot be looked at: File name too long",
        f"run_dir: the run directory {tmp_path}/{LONG} cannot be looked at: File name too long",
    ]
    assert usable_data_files(cfg) == []


def test_a_directory_that_may_not_be_entered_is_named(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load(make_config(), [f"run_dir={tmp_path / 'closed' / 'run'}"])
    stat = os.stat

    def closed(path: str | Path, **options: bool) -> os.stat_result:
        if "closed" in Path(path).parts[:-1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    # The superuser may enter any directory, so a mode bit would not show this.
    monkeypatch.setattr(os, "stat", closed)
    assert path_problems(cfg) == [
        f"run_dir: the run directory {tmp_path / 'closed' / 'run'} cannot be looked at: Permission denied"
    ]
