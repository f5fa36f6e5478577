"""Plans on disk: what an engine's rank gets from where, found again by a hash of everything that it follows from.

In: facts, and a way to compute the plan. Out: a `Plan`, computed once. A file holds numbers alone, is written whole or
not at all, and is an error where it was made from other facts than its name says.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from rlmegatron.weight_sync.plan import Ints, Pieces

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of one engine rank, and the numbers [P] of its parameters with elements that no piece writes."""

    pieces: Pieces
    padded: Ints


def find_plan(directory: Path | None, facts: tuple[object, ...], compute: Callable[[], Plan]) -> Plan:
    """From the directory, or computed and kept there; with None nothing is kept.

    facts: plain values with a faithful repr. ValueError for a file that holds something else.
    """
    if directory is None:
        return compute()
    key = hashlib.sha256(f"{_sources()} {facts!r}".encode()).hexdigest()
    path = directory / f"{key[:32]}.npz"
    if path.exists():
        return _read(path, key)
    plan = compute()
    _write(path, key, plan)
    return plan


@cache
def _sources() -> str:
    """A hash of the code that makes plans: another version makes others."""
    digest = hashlib.sha256()
    for part in ("models", "weight_sync"):
        for path in sorted((_PACKAGE / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, key: str) -> Plan:
    try:
        with np.load(path, allow_pickle=False) as content:
            columns = {name: content[name] for name in ("key", "padded", *(field.name for field in fields(Pieces)))}
    except (BadZipFile, KeyError, EOFError, ValueError, NotImplementedError, OSError):
        raise ValueError(f"{path}: not a whole plan; remove the file, and it is made again") from None
    if str(columns.pop("key")) != key:
        raise ValueError(f"{path}: this plan was made for another layout; remove the file, and it is made again")
    numbers = {name: column.astype(np.int64) for name, column in columns.items()}
    return Plan(padded=numbers.pop("padded"), pieces=Pieces(**numbers))


def _write(path: Path, key: str, plan: Plan) -> None:
    """Ranks of several nodes may write the same plan at once."""
    partial = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.partial.npz")
    columns = {field.name: getattr(plan.pieces, field.name) for field in fields(Pieces)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path.parent}: no plan can be kept there ({error.strerror})") from None
    try:
        np.savez(partial, key=np.array(key), padded=plan.padded, **columns)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ValueError(f"{path.parent}: no plan can be kept there ({error.strerror})") from None
