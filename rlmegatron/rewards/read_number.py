r"""Reading numbers from text: the last one in prose, or the one that a text is as a whole.

In: text. Out: a `Number`, or None. Must never import anything of ours; numbers are exact fractions of bounded size, so
that `1e999999999` and `10^10^10` cost nothing.
"""

from __future__ import annotations

import re
import string
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 400
MAX_EXPONENT = 400
MAX_POWER_DIGITS = 1000
"""Digits of a base times its exponent: about those of the power."""
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
          |\s*(?:\\times|\\cdot|[×·*x])\s*10\s*\^\s*(?:\{{\s*(?P<ten_power>[+-]?\d+)\s*\}}|(?P<bare_ten_power>[+-]?\d+))
          |\s*\^\s*(?:\{{\s*(?P<power>[+-]?\d+)\s*\}}|(?P<bare_power>[+-]?\d+))(?P<tower>\s*\^)?)?
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

_EXPONENT = r"\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+)"
_WITHOUT_MEANING = [
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        (rf"\\(?:text\w*|mbox)\s*\{{[^{{}}\d]*\}}(?:{_EXPONENT})?(?:\s*(?:/|\\cdot)\s*(?=\\text))?", " "),  # a unit
        (r"\\frac\s*\{\s*\}\s*\{\s*\}", " "),  # what is left of a fraction of units
        (r"\\(?:text\w*|mbox|math\w+|boldsymbol)\s*\{([^{}]*)\}", r" \1"),
        (r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)\s*[CFK]?(?![A-Za-z])", " "),
        (r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\[;:() \[\]]|\*\*", " "),
        (r"</?\w+>|<\|\w*\|>", " "),
        (rf"(?<=[A-Za-z])(?:{_EXPONENT}|[²³])", " "),  # cm^2; in x^2 + 1 the x and the plus refuse the text
        (r"(?<=[A-Za-z])\s*[/-]\s*(?=[A-Za-z])", " "),  # km/h
        (r"\(([A-Za-z ]{3,})\)", r" \1 "),
        (r"^\s*\(([^(),]*)\)[\s.]*$", r"\1"),
        (r"^\s*([+-])\s+", r"\1"),
    )
]
_EQUALS = re.compile(r"=|≈|\\approx(?![A-Za-z])")
_ARITHMETIC = re.compile(r"(?:[\d\s.+*/()$%×÷·=-]|,(?=\d{3})|\\(?:times|cdot|div)(?![A-Za-z]))*", re.ASCII)
_NAME = re.compile(r"(?:[^\d=,;<>+*/^|_()-]|_\w|_\{\w+\}|\([^()=]*\))*", re.ASCII)
"""Left of an equals sign: what was worked out, or what the number is called, as x_1, f(3) or \\text{total}."""
_WORD = re.compile(r"[^\W\d_]+")
_PUNCTUATION = frozenset(" \t\r\n$€£¥:~.,;\"'’?{}")
_UNITS = "m g s h l L cm mm km kg mg lb oz ft in mi yd hr ml mL sq"
_ENGLISH = "th st nd rd a an am as at be by is it of on or pm so to us"
_SHORT_WORDS = frozenset((*_UNITS.split(), *_ENGLISH.split()))
"""Other words of one or two letters are variables."""
_FUNCTIONS = "pi sqrt log sin cos tan exp mod inf infinity factorial root minus negative plus abc xyz"
_MATHEMATICS = frozenset(_FUNCTIONS.split())
_PROSE_WORDS = 4
_SHORT_TEXT = 40


@dataclass(frozen=True, slots=True)
class Number:
    """A number read from text; a percentage is already divided by 100."""

    value: Fraction
    is_percentage: bool = False


def last_number(text: str) -> Number | None:
    """The last number in `text` that is not an exponent or an index; None if there is none, or it is out of bounds."""
    last_digit = max(text.rfind(digit) for digit in string.digits)
    if last_digit < 0:
        return None
    text = _spelt_plainly(text[max(0, last_digit - _BEFORE) : last_digit + _AFTER])
    matches = (one for one in _NUMBER.finditer(text) if not text.endswith(("^", "^{", "_", "_{"), 0, one.start()))
    last = deque(matches, maxlen=1)
    return _parse(last[0]) if last else None


def only_number(text: str) -> Number | None:
    r"""The number that `text` is; None if it is none, or holds more: an expression, a list, a range, another base.

    Beside the number may stand what it counts and what it is called or was worked out from: `$5`, `6 \text{ cm}^2`,
    `90^\circ`, `about 5 apples`, `x = 8`, `48 + 24 = 72`.

    >>> only_number("3^{4}"), only_number("3_4"), only_number(r"2\sqrt{3}")
    (Number(value=Fraction(81, 1), is_percentage=False), None, None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = _spelt_plainly(text)
    *left, text = _EQUALS.split(text)
    named = "=".join(left)
    if not (_ARITHMETIC.fullmatch(named) or _NAME.fullmatch(named)):
        return None
    for pattern, replacement in _WITHOUT_MEANING:
        text = pattern.sub(replacement, text)
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1 or not _is_wording(text[: matches[0].start()]) or not _is_wording(text[matches[0].end() :]):
        return None
    return _parse(matches[0])


def is_prose(text: str) -> bool:
    """Whether `text` is sentences around numbers, such as a worked solution, rather than an answer alone."""
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\(?:begin|end)\s*\{\w*\}|\\[A-Za-z]+", " ", text))
    return len(text.strip()) > _SHORT_TEXT and len(words) >= _PROSE_WORDS


def _spelt_plainly(text: str) -> str:
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    return text


def _is_wording(text: str) -> bool:
    """Whether `text` beside a number leaves it what it is: words, units, currencies and punctuation."""
    return _PUNCTUATION.issuperset(_WORD.sub("", text)) and all(map(_is_ordinary, _WORD.findall(text)))


def _is_ordinary(word: str) -> bool:
    if not word.isalpha() or any("\u0370" <= letter <= "\u03ff" for letter in word):  # superscripts; Greek
        return False
    if word.isascii() and len(word) <= 2:
        return word in _SHORT_WORDS
    return word.lower() not in _MATHEMATICS


def _parse(match: re.Match[str]) -> Number | None:
    """The value of a match, or None if it is longer than any answer, or divides by zero."""
    group = match.groupdict()
    exponent = int((group["exponent"] or group["ten_power"] or group["bare_ten_power"] or "0")[:8])
    power = int((group["power"] or group["bare_power"] or "1")[:8])
    top = group["plain"] or group["top"] or group["top_digit"]
    bottom = group["over"] or group["bottom"] or group["bottom_digit"] or "1"
    assert top is not None, f"a number without digits: {match.group()!r}"
    if len(match.group()) > MAX_CHARACTERS or abs(exponent) > MAX_EXPONENT:
        return None
    if group["tower"] or abs(power) * len(top) > MAX_POWER_DIGITS:
        return None
    base, divisor = _plain(top), _plain(bottom)
    if divisor == 0 or (base == 0 and power < 0):
        return None
    value = Fraction(group["whole"] or 0) + base**power * Fraction(10) ** exponent / divisor
    value = -value if group["sign"] == "-" else value
    return Number(value / 100, is_percentage=True) if group["percent"] else Number(value)


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
