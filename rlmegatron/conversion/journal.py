"""An output directory that is not finished yet: what it is made from, and which groups it already holds.

In: a path and an identity (plain JSON values). Out: a `.partial` directory that a later run of the same conversion goes
on with, and that only `finish` gives its name. Written by any number of processes, each its own groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_FOLDER = ".conversion"
_IDENTITY = "identity"
_CALLED_OFF = "called_off"


class Journal:
    """`partial` is where the files go; `has`, `note` and `result` take the number of a group, or a name."""

    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.partial = self.out.parent / f"{self.out.name}.partial"
        self._folder = self.partial / _FOLDER
        self._lock: IO[str] | None = None

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin, or go on; ValueError where something else stands at either path. On one process alone."""
        if os.path.lexists(self.out):
            raise ValueError(f"{self.out} exists already; delete it or give another --out")
        if not self.partial.exists():
            self._folder.mkdir(parents=True)
        if not self._folder.is_dir():
            raise ValueError(f"{self.partial} is no unfinished conversion; delete it or give another --out")
        self._lock_out_others()
        self._entry(_CALLED_OFF).unlink(missing_ok=True)
        if not self.has(_IDENTITY):
            self.note(_IDENTITY, dict(identity))
        found = self.result(_IDENTITY)
        if found != dict(identity):
            found = found if isinstance(found, dict) else {}
            changed = ", ".join(sorted(key for key in {**found, **identity} if found.get(key) != identity.get(key)))
            raise ValueError(
                f"{self.partial} is an unfinished conversion of something else (changed: {changed}); delete it or give "
                "another --out"
            )

    def has(self, item: int | str) -> bool:
        """Whether it is finished."""
        return self._entry(item).is_file()

    def note(self, item: int | str, result: Any) -> None:
        """It is finished: what it wrote is on the disk itself, not only on its way there."""
        path = self._entry(item)
        temporary = path.with_name(path.name + ".new")
        with temporary.open("w") as file:
            json.dump(result, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def result(self, item: int | str) -> Any:
        """What was noted for it."""
        path = self._entry(item)
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); delete {self.partial} to start again") from None

    def forget(self, item: int | str) -> None:
        """It has to be done once more."""
        self._entry(item).unlink(missing_ok=True)

    def call_off(self) -> None:
        """Tell the other processes that the conversion has failed."""
        with contextlib.suppress(OSError):  # the disk may be full: then they will soon find out themselves
            self._entry(_CALLED_OFF).touch()

    def is_called_off(self) -> bool:
        """Whether a process has failed."""
        return self._entry(_CALLED_OFF).exists()

    def finish(self) -> None:
        """Give the directory its name. On one process alone, after every group."""
        for path in [*filter(Path.is_file, self.partial.rglob("*")), self.partial]:
            _sync(path)
        self.partial.rename(self.out)
        _sync(self.out.parent)
        shutil.rmtree(self.out / _FOLDER)

    def _entry(self, item: int | str) -> Path:
        return self._folder / f"{item}.json"

    def _lock_out_others(self) -> None:
        """As long as this process lives: two would write into each other's files."""
        self._lock = (self._folder / "lock").open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(f"another process is writing {self.partial}; wait for it or give another --out") from None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
