"""Words that errors share: alternatives in a row, a value as YAML has it, and the name that was probably meant.

In: values and names. Out: text. Must never import any other module of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

_NUM_LISTED = 12
_MOST_CHARACTERS = 60


def listed(values: Sequence[int] | Sequence[str]) -> str:
    """'1, 2 or 4'; of many the first ones and the last.

    >>> listed([1, 2, 4]), listed(["auto"])
    ('1, 2 or 4', 'auto')
    """
    shown = [str(value) for value in values]
    if len(shown) > _NUM_LISTED:
        shown = [*shown[: _NUM_LISTED - 1], "...", shown[-1]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def as_yaml(value: Any) -> str:
    """A value as the user would have typed it, cut to a readable length.

    >>> [as_yaml(value) for value in (None, True, 0.5, "grpo", (1, 2))]
    ['null', 'true', '0.5', "'grpo'", '[1, 2]']
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that is spelt most like `word`; `cutoff` is how alike it must be, as a share."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the nearest of `known`, empty where none is near.

    >>> did_you_mean("gpro", ["grpo", "gae"]), did_you_mean("x", ["grpo"])
    ("did you mean 'grpo'?", '')
    """
    close = nearest(word, known)
    return "" if close is None else f"did you mean '{close}'?"
