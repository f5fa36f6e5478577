"""The verifier `regex`: the response must match a regular expression.

In: an `Answer` and a pattern. Out: 1.0 or 0.0. Must never import torch; a pattern can take exponential time, so the
judge runs this verifier in a process that it can end.
"""

from __future__ import annotations

import re
from typing import Literal

from rlmegatron.rewards.api import Answer


def regex(
    answer: Answer,
    *,
    pattern: str,
    mode: Literal["search", "fullmatch"] = "search",
    ignore_case: bool = False,
    dot_all: bool = True,
    strip: bool = False,
    require_stop: bool = False,
) -> float:
    """1.0 if the response matches `pattern` (Python's `re` syntax), else 0.0.

    mode: anywhere in the response, or all of it. dot_all: '.' also matches a line break.
    strip: take white space off both ends of the response first. require_stop: a cut-off answer earns 0.0.
    """
    if require_stop and answer.finish_reason != "stop":
        return 0.0
    text = answer.response.strip() if strip else answer.response
    compiled = re.compile(pattern, (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if dot_all else 0))
    return float((compiled.search(text) if mode == "search" else compiled.fullmatch(text)) is not None)


def check_regex(*, pattern: str, **_: object) -> None:
    """Raises ValueError for a pattern that does not compile."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"reward.args.pattern: {pattern!r} is not a regular expression: {error}") from None
