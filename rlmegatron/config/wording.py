"""Words that errors share: alternatives in a row, a value as YAML has it, and the name that was probably meant.

In: values and names. Out: text. Must never import any other module of ours.
"""

from __future__ import annotations

import difflib
import re
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


def as_typed(value: Any) -> str:
    """As `as_yaml`, with numbers as short as they were typed: a float that was given as 3 has become 3.0.

    >>> [as_typed(value) for value in (3.0, 1e-6, False)]
    ['3', '1e-06', 'false']
    """
    return f"{value:g}" if isinstance(value, float) else as_yaml(value)


def plain(word: str) -> str:
    """`word` without what is spelt differently from one library to the next: case, '_', '-', '.', and '+' for 'p'.

    >>> plain("REINFORCE++"), plain("dr.grpo"), plain("reinforce_pp")
    ('reinforcepp', 'drgrpo', 'reinforcepp')
    """
    return re.sub(r"[\W_]", "", word.casefold().replace("+", "p"))


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word that is spelt most like `word`; `cutoff` is how alike it must be, as a share.

    >>> nearest("Clip-High", ["clip_low", "clip_high"])
    'clip_high'
    """
    words = list(known)
    if same := [one for one in words if plain(one) == plain(word) != ""]:
        return same[0]
    close = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the nearest of `known`, empty where none is near.

    >>> did_you_mean("gpro", ["grpo", "gae"]), did_you_mean("x", ["grpo"])
    ("did you mean 'grpo'?", '')
    """
    close = nearest(word, known)
    return "" if close is None else f"did you mean '{close}'?"
