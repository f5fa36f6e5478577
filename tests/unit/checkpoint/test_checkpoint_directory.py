"""Which checkpoints are whole, which is the newest, and which are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmegatron.checkpoint.directory import CheckpointDirectory


def write(directory: CheckpointDirectory, step: int) -> None:
    directory.open(step)
    (directory.partial(step) / "actor").mkdir()
    directory.seal(step, {"step": step})


def test_a_directory_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints", keep=2)
    assert directory.steps() == [] and directory.newest() is None


def test_a_partial_checkpoint_is_never_counted(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=5)
    write(directory, 3)
    directory.open(4)
    (directory.partial(4) / "state.json").write_text("{}")
    for other in ("step_000009.partial", "step_12", "step_000007.bak", "export", "xstep_000008"):
        (tmp_path / other).mkdir()
    assert directory.steps() == [3] and directory.newest() == 3


def test_the_newest_is_by_number(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=9)
    for step in (5, 20, 1_000_000, 999_999):
        write(directory, step)
    assert directory.steps() == [5, 20, 999_999, 1_000_000] and directory.newest() == 1_000_000
    assert directory.of(5).name == "step_000005" and directory.of(1_000_000).name == "step_1000000"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        write(directory, step)
    assert directory.steps() == [3, 4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step_000003", "step_000004"]


def test_what_a_stopped_run_left_is_cleared(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    directory.open(1)
    (directory.partial(1) / "half.a.file").write_text("")
    directory.open(1)
    assert list(directory.partial(1).iterdir()) == []


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    write(directory, 1)
    (directory.of(1) / "old").write_text("")
    directory.open(1)
    directory.seal(1, {"step": 1, "again": True})
    assert directory.state(1) == {"step": 1, "again": True}
    assert not (directory.of(1) / "old").exists()


@pytest.mark.parametrize("content", [None, b"", b'{"step": ', b"[1, 2]", b"\xff\xfe"])
def test_a_state_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    directory = CheckpointDirectory(tmp_path, keep=2)
    write(directory, 1)
    path = directory.of(1) / "state.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000001/state.json: cannot be read .*delete .*step_000001 to resume"):
        directory.state(1)
