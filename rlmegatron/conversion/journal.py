"""An output directory that is not finished yet: what it is made from, and which groups it already holds.

In: a path and an identity (plain JSON values). Out: a `.partial` directory that a later run of the same conversion goes
on with, and that only `finish` gives its name. Written by any number of processes, each its own groups.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = ".conversion"
_IDENTITY = "identity.json"


class Journal:
    """`partial` is where the files go; `is_new` says after `open` whether nothing was there before."""

    def __init__(self, out: Path) -> None:
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        self._folder = self.partial / _FOLDER
        self.is_new = True

    def open(self, identity: Mapping[str, Any]) -> None:
        """Begin, or go on; ValueError where something else stands at either path. On one process alone."""
        if self.out.exists():
            raise ValueError(f"{self.out} exists already; delete it or give another --out")
        if not self.partial.exists():
            self._folder.mkdir(parents=True)
            _write(self._folder / _IDENTITY, dict(identity))
            return
        found = _read(self._folder / _IDENTITY)
        if found != dict(identity):
            changed = [key for key in identity if not isinstance(found, dict) or found.get(key) != identity[key]]
            raise ValueError(
                f"{self.partial} is an unfinished conversion of something else ({', '.join(changed)} differ); "
                "delete it or give another --out"
            )
        self.is_new = False

    def has(self, number: int) -> bool:
        """Whether a group is finished."""
        return self._entry(number).is_file()

    def note(self, number: int, result: Any) -> None:
        """A group is finished: its files are on disk."""
        _write(self._entry(number), result)

    def result(self, number: int) -> Any:
        """What was noted for a group."""
        return _read(self._entry(number))

    def finish(self) -> None:
        """Give the directory its name. On one process alone, after every group."""
        shutil.rmtree(self._folder)
        self.partial.rename(self.out)

    def _entry(self, number: int) -> Path:
        return self._folder / f"{number}.json"


def _write(path: Path, value: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete {path.parents[1]} to start again") from None
