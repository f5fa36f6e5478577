"""Which metrics docs/metrics.md has a row for.

In: the page. Out: patterns of names. Must never look at the code that writes metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def undocumented(names: set[str]) -> set[str]:
    """Those of `names` that no row is about."""
    patterns = [re.compile(pattern) for pattern in _patterns()]
    return {name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)}


def _patterns() -> Iterator[str]:
    """Of a row's names the first is whole; the others replace its end, from a '/', from a '_', or after the '/'."""
    for row in re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        yield _pattern(first)
        for other in others:
            stem = first.rpartition("/")[0]
            if other.startswith("_"):
                yield _pattern(first + other)
                yield _pattern(first.rpartition("_")[0] + other)
            else:
                yield _pattern(other if other.startswith(stem) else f"{stem}/{other.removeprefix('/')}")


def _pattern(name: str) -> str:
    return "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
