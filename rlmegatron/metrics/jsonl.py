"""Owns metrics.jsonl: one JSON object per write, `step` first.

In: final numbers; out: lines that are on disk when `write` returns, with no row of a step that a resumed run repeats.
Must never import torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


class JsonlSink:
    """Appends rows to a file; NaN and infinities, which JSON does not have, are written as null."""

    def __init__(self, path: Path | str, *, resumed_from: int | None) -> None:
        """Open the file: a run resumed from step k goes on behind its rows up to k, later ones are dropped.

        A fresh run (None) starts an empty file and keeps the one it finds as <name>.bak. Raises ValueError that names
        the line when a row of the file to resume is not what this class writes (a torn last line is dropped).
        """
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            if resumed_from is None:
                os.replace(self._path, self._path.with_name(self._path.name + ".bak"))
            else:
                _truncate(self._path, resumed_from)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row, flushed."""
        row = {"step": step, **{name: value if math.isfinite(value) else None for name, value in metrics.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk and close."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _truncate(path: Path, last_step: int) -> None:
    """Keep the rows up to `last_step`, by replacing the file in one move so that a crash here loses nothing."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines, 1) if _step(path, number, line, len(lines)) <= last_step]
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _step(path: Path, number: int, line: str, num_lines: int) -> float:
    """The row's step; infinite, so that it is dropped, for a last line that the end of a process cut short."""
    if number == num_lines and not line.endswith("\n"):
        return math.inf
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} line {number}: not a metrics row (a JSON object with 'step'): {line[:80]!r}"
        ) from error
    if not isinstance(step, int):
        raise ValueError(f"{path} line {number}: 'step' must be a whole number, got {step!r}")
    return step
