"""Looks at what is installed without loading it into this process: versions, files, and imports tried in a child.

In: names of distributions and modules. Out: plain values. Must never import what it looks at, so that a broken package
cannot take the caller down.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_CHILD_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a piece of Python went in a child: what it printed, and (if it failed) the last line of its error."""

    output: str
    error: str | None


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed, 'unknown' if its metadata is broken."""
    try:
        version: str | None = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    except KeyError:
        return "unknown"
    return version or "unknown"


def directory_of(module: str) -> Path | None:
    """The directory of a top-level package or the one that holds a top-level module; None if it cannot be found."""
    assert "." not in module, "looking for a submodule would import its parent"
    # Not importlib.util.find_spec: that answers from what is already loaded, and a child would search anew.
    spec = next((found for finder in sys.meta_path if (found := finder.find_spec(module, None))), None)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).parent if spec.origin else None


def try_in_child(code: str, *, timeout_s: float = _CHILD_TIMEOUT_S) -> Attempt:
    """Run `code` in a fresh Python with this one's search path; a crash or a hang there is an error here, no more."""
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": search_path, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, errors="replace", check=False
        )
    except subprocess.TimeoutExpired:
        return Attempt("", f"no answer within {timeout_s:g} s")
    if done.returncode == 0:
        return Attempt(done.stdout, None)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return Attempt(done.stdout, lines[-1].strip() if lines and done.returncode > 0 else ended)


def numbers_in(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.13.0+cpu' is (2, 13, 0), '0.17rc1' is (0, 17)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
