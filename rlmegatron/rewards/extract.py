r"""Where in a response its final answer stands: `\boxed{}`, after `####`, in `<answer>` tags, or on the last line.

In: the text of a response. Out: the text of its final answer, or None. Must never import anything of ours; every
function takes time linear in the text, so that the cheap verifiers need no time-out.
"""

from __future__ import annotations

from typing import Literal

Place = Literal["whole", "boxed", "hashes", "answer_tag", "last_line"]
"""Where the final answer stands in a response."""


def final_answer(text: str, place: Place) -> str | None:
    """The part of `text` that is its final answer, or None if `place` does not occur in it."""
    if place == "whole":
        return text
    if place == "boxed":
        return last_boxed(text)
    if place == "hashes":
        return after_hashes(text)
    if place == "answer_tag":
        return last_tagged(text, "answer")
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}`, braces balanced; None if there is none or it never closes."""
    starts = [(text.rfind(opening), len(opening)) for opening in ("\\boxed{", "\\fbox{")]
    position, width = max(starts)
    if position < 0:
        return None
    depth = 1
    for index in range(position + width, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[position + width : index]
    return None


def after_hashes(text: str) -> str | None:
    """The first line with text after the last `####` (the convention of GSM8K), or None."""
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    return rest.lstrip().partition("\n")[0]


def last_tagged(text: str, tag: str) -> str | None:
    """Content of the last `<tag>...</tag>`, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end] if start >= 0 else None
