r"""The verifier `numeric_answer`: the response must give the reference's number, within a tolerance.

In: an `Answer` whose row holds a number or a text with one. Out: 1.0 or 0.0. Must never import torch; numbers are
exact fractions of bounded size, so that a response such as `1e999999999` costs nothing.
"""

from __future__ import annotations

import math
import re
import string
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from rlmegatron.rewards.api import Answer
from rlmegatron.rewards.extract import after_hashes, last_boxed

MAX_CHARACTERS = 400
MAX_EXPONENT = 400
_BEFORE = 3 * MAX_CHARACTERS
_AFTER = 64
"""Characters around the last digit that are read: a number that reaches further is too long anyway."""

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""
    (?=[-+$.\d\\])                                             # fails fast where no number can start
    (?P<sign>(?<![\w.)\]}}])[+-])?                              # a minus after a digit or a bracket is an operator
    \$?
    (?:(?P<whole>\d+)(?:[ ](?=\d+/\d)|[ ]?(?=\\frac)))?         # 1 1/2, 1\frac{{1}}{{2}}
    (?:
        \\frac\s*(?:\{{\s*(?P<top>-?{_PLAIN})\s*\}}|(?P<top_digit>\d))
             \s*(?:\{{\s*(?P<bottom>-?{_PLAIN})\s*\}}|(?P<bottom_digit>\d))
      | (?P<plain>{_PLAIN})
        (?:[eE](?P<exponent>[+-]?\d+)
          |\s*(?:\\times|\\cdot|[×·*x])\s*10\s*\^\s*(?:\{{\s*(?P<power>[+-]?\d+)\s*\}}|(?P<bare_power>[+-]?\d+)))?
        (?:\s*/\s*(?P<over>{_PLAIN}))?
    )
    (?P<percent>\s*%)?
    """,
    re.VERBOSE | re.ASCII,
)
_SPELLINGS = {
    "\u2212": "-",  # minus sign
    "\uff0d": "-",  # full-width hyphen-minus
    "\u2044": "/",  # fraction slash
    "\uff0c": ",",  # full-width comma
    "\uff05": "%",  # full-width percent sign
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "{,}": ",",
    "\\,": "",
    "\\!": "",
    "\\%": "%",
    "\\$": "$",
}


@dataclass(frozen=True, slots=True)
class Number:
    """A number read from text; a percentage is already divided by 100."""

    value: Fraction
    is_percentage: bool = False


def numeric_answer(
    answer: Answer,
    *,
    answer_key: str = "answer",
    take: Literal["auto", "boxed", "hashes", "last"] = "auto",
    abs_tol: float = 1e-6,
    rel_tol: float = 0.0,
    require_stop: bool = False,
) -> float:
    """1.0 if the response's number is within max(abs_tol, rel_tol * |reference|) of the reference, else 0.0.

    answer_key: column of the reference: a number, or a text that is read as 'auto' reads a response.
    take: 'boxed' (last number in the last \\boxed{}), 'hashes' (after the last '####'), 'last' (last number of the
        response), or 'auto': the first of these whose mark occurs in the response.
    Understands 1,234.5, -3, 2/3, 1 1/2, \\frac{2}{3}, 50%, 1e-3, 3 \\times 10^4, $5 and the Unicode minus. If only one
    of the two numbers is a percentage, 50% equals both 50 and 0.5. A response without a number earns 0.0.
    Raises ValueError if the column is missing or holds no number.
    """
    reference = _reference(answer.column(answer_key, argument="answer_key"), answer_key)
    if require_stop and answer.finish_reason != "stop":
        return 0.0
    given = find_number(answer.response, take)
    return float(given is not None and _agree(given, reference, abs_tol=abs_tol, rel_tol=rel_tol))


def check_numeric_answer(*, abs_tol: float = 1e-6, rel_tol: float = 0.0, **_: object) -> None:
    """Raises ValueError for tolerances that no number can be within."""
    for name, value in (("abs_tol", abs_tol), ("rel_tol", rel_tol)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"reward.args.{name}: {value} is not allowed, must be finite and at least 0")


def find_number(text: str, take: Literal["auto", "boxed", "hashes", "last"] = "auto") -> Number | None:
    """The number that `text` gives as its answer, or None."""
    part: str | None = text
    if take == "boxed" or (take == "auto" and ("\\boxed{" in text or "\\fbox{" in text)):
        part = last_boxed(text)
    elif take == "hashes" or (take == "auto" and "####" in text):
        part = after_hashes(text)
    return None if part is None else _last_number(part)


def _last_number(text: str) -> Number | None:
    last_digit = max(text.rfind(digit) for digit in string.digits)
    if last_digit < 0:
        return None
    text = text[max(0, last_digit - _BEFORE) : last_digit + _AFTER]
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _parse(last[0]) if last else None


def _parse(match: re.Match[str]) -> Number | None:
    """The value of a match, or None if it is longer than any answer, or divides by zero."""
    group = match.groupdict()
    exponent = int((group["exponent"] or group["power"] or group["bare_power"] or "0")[:8])
    if len(match.group()) > MAX_CHARACTERS or abs(exponent) > MAX_EXPONENT:
        return None
    top = group["plain"] or group["top"] or group["top_digit"]
    bottom = group["over"] or group["bottom"] or group["bottom_digit"] or "1"
    assert top is not None, f"a number without digits: {match.group()!r}"
    divisor = _plain(bottom)
    if divisor == 0:
        return None
    value = Fraction(group["whole"] or 0) + _plain(top) * Fraction(10) ** exponent / divisor
    value = -value if group["sign"] == "-" else value
    return Number(value / 100, is_percentage=True) if group["percent"] else Number(value)


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _reference(value: object, answer_key: str) -> Number:
    number = None
    if isinstance(value, str):
        number = find_number(value)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        number = Number(Fraction(repr(value)))
    if number is None:
        raise ValueError(f"column {answer_key!r} holds {value!r:.80}, in which numeric_answer finds no number")
    return number


def _agree(given: Number, reference: Number, *, abs_tol: float, rel_tol: float) -> bool:
    pairs = [(given.value, reference.value)]
    if given.is_percentage and not reference.is_percentage:
        pairs.append((given.value * 100, reference.value))
    elif reference.is_percentage and not given.is_percentage:
        pairs.append((given.value, reference.value * 100))
    absolute, relative = Fraction(abs_tol), Fraction(rel_tol)
    return any(abs(one - other) <= max(absolute, relative * abs(other)) for one, other in pairs)
