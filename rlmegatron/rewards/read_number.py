r"""Reading numbers from text: the last one of prose, or the one that a text is as a whole.

In: text. Out: a `Number`, or None. Must never import anything of ours; numbers are exact fractions of bounded size, so
that `1e999999999` and `10^10^10` cost nothing.
"""

from __future__ import annotations

import re
import string
import unicodedata
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
    "\u2013": "-",  # en dash: before a digit a minus, as in prose a dash
    "\uff0d": "-",  # full-width hyphen-minus
    "\u2044": "/",  # fraction slash
    "\uff0c": ",",  # full-width comma
    "\uff05": "%",  # full-width percent sign
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "{,}": ",",
    "\\,": " ",
    "\\!": "",
    "\\%": "%",
    "\\$": "$",
}

_GROUP_BLANK = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", re.ASCII)
"""The blank of 70\\,000; an ordinary one is not read as such, it stands in lists as well."""
_EXPONENT_BRACES = re.compile(r"\^\s*\{\s*([+-]?\d+|\\circ|th|st|nd|rd)\s*\}(?!\w)", re.ASCII)
_TEXT = re.compile(r"\\(?:text\w*|math\w+|[mhf]box|boxed|emph|underline|operatorname|boldsymbol)\s*\{([^{}]*)\}(\w?)")


def _substitutions(*rows: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rows]


_LAYOUT = _substitutions(
    (r"\\(?:left|right|displaystyle|q?quad|rm|bf|therefore|n)(?![A-Za-z])", " "),
    (r"\\[;:() \[\]\\]", " "),
    (r"</?\w+>|<\|\w*\|>", " "),
    (r"[\s~\u200b-\u200f\u2060\ufeff]+", " "),
)
_HARMLESS = _substitutions(
    (r"\\pounds ?|[€£¥₹]", "$"),  # as a part of the number, so that -£5 is negative
    (r"(^ ?|[:(] ?)([+-]) ", r"\1\2"),  # - 7
    (r" -+(?= )", " "),  # a dash that stands apart
    (r"(?<=\d) ?-", " "),  # 18-year-old
    (r"\*([^*]*)\*", r" \1 "),
    (r"^ ?\([A-E]\)", " "),  # the label of a choice
    (r"(?<!\w)[A-Za-z](?:\.[A-Za-z])+(?!\w)", " "),  # p.m., U.S.
    (r"\\frac ?\{([A-Za-z ]+)\} ?\{([A-Za-z ]+)\}", r" \1/\2"),  # a fraction of units
    (r" ?\^ ?(?=(?:th|st|nd|rd)(?!\w))", ""),
    (r" ?\^ ?\\circ|\\degree", " "),
    (r"(?<=[A-Za-z]) ?(?:\^ ?-?\d|[²³])", " "),  # cm^2; in x^2 + 1 the x and the plus refuse the text
    (r"(?:\\cdot|[·*]) ?(?=[A-Za-z])", " "),  # N \cdot m
    (r" ?/(?= ?[A-Za-z])", " "),  # km/h, $5/day
    (r"(?<=[\d}]) ?per ?cent(?![A-Za-z])", "%"),
)
_CHANGED = re.compile(
    r"""\((?=[^()]*\d)[^()]*,   # a tuple, or an interval
      | \w\((?=[^()]*\d)        # a function of the number
      | [\d})%][ ]?!            # a factorial
      | \.\d+[ ]?(?:\.\.|…)      # decimals that go on
    """,
    re.VERBOSE,
)
_EQUALS = re.compile(r"=|≈|\\approx(?![A-Za-z])")
_DERIVATION = re.compile(
    r"""(?:
        [\d .+*/(){}$%×÷·^!-] | ,(?=\d{3}) | (?:(?<=\d)|(?<=\d[ ]))x(?=[ ]?\d)
      | \\(?:times|cdot|div|frac|sqrt|d?binom)
      | (?<![\w^])(?:[^\W\d_]{2,}|[aAI](?=[ ][A-Za-z]{2}))(?![\w^(]) | (?<=[A-Za-z])[,:]
    )*""",
    re.VERBOSE,
)
"""How the number was found: arithmetic, with words but without variables."""
_NAME = re.compile(r"(?:[^\d=,;<>+*/^|_()!-]|(?<=[A-Za-z]{2}),|_\w|_\{\w+\}|\([^()=]*\))*", re.ASCII)
"""What the number is called, as x_1, f(3) or total cost."""

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_PUNCTUATION = frozenset(" .,:;!?\"'`{}()—…。：\ufe0f")
_HARMLESS_CATEGORIES = frozenset(("Sc", "So", "Pi", "Pf"))  # currencies, pictograms, quotation marks
_MATHEMATICS = "pi root sqrt log ln sin cos tan exp mod modulo base factorial infinity infinite inf minus plus"
_MULTIPLES = "hundred hundreds thousand thousands million millions billion billions trillion mln bn dozen dozens"
_PARTS = "half halves thirds fourths fifths eighths tenths hundredths thousandths"
_PRODUCTS = "xy yz xz xyz ab abc"
_CHANGING = frozenset(f"{_MATHEMATICS} {_MULTIPLES} {_PARTS} {_PRODUCTS}".split())
_CHANGING_NEXT = frozenset(["negative", "not", "except", "than", "times", "twice", "double", "triple"])
_CHANGING_LAST = frozenset(["squared", "cubed", "choose"])
"""Words that change the value of a number: one anywhere beside it, the one right before it, the one right behind."""
_CHANGING_SIGNS = re.compile("[π万亿萬億负負]")
_ARTICLES = frozenset("aAI")
_UNIT_LETTERS = frozenset("mgshlLVWJNACFKΩ")
_ORDINALS = "th st nd rd am pm"
_LENGTHS = "mm cm dm km nm um in ft yd yds mi ha cc ml dl cl gal qt pt oz lb lbs mg kg tsp px"
_TIMES = "ms sec min hr hrs yr yrs mph kph"
_ELECTRIC = "kw mw kwh gb mb tb kb hz khz mhz ghz kj ev pa kpa db mol usd eur"
_GLUED = frozenset(f"{_ORDINALS} {_LENGTHS} {_TIMES} {_ELECTRIC}".split())
_LONG_WORD = 4
"""Letters of a word that is one even without a blank before it: 18dollars."""
_PROSE_WORDS = 4
_SHORT_TEXT = 40


@dataclass(frozen=True, slots=True)
class Number:
    """A number read from text; a percentage is already divided by 100."""

    value: Fraction
    is_percentage: bool = False


def last_number(text: str) -> Number | None:
    """The last number in `text` that is not an exponent or an index; None if there is none, or it is out of bounds."""
    match = _last_match(_spelt_plainly(_around_the_last_digit(text)))
    return _parse(match) if match else None


def sentence_number(text: str) -> Number | None:
    r"""As `last_number`, but None if the word next to the number changes its value: `negative 5`, `2 million`."""
    match = _last_match(_laid_out(_around_the_last_digit(text)))
    if match is None:
        return None
    before, behind = _words_beside(match)
    beside = [word.lower() for word in (*before[-1:], *behind[:1])]
    return None if _changes_value(before, behind, anywhere=beside) else _parse(match)


def only_number(text: str) -> Number | None:
    r"""The number that `text` is; None if it is none, or holds more: an expression, a list, a range, another base.

    Left of an equals sign may stand what it is called or how it was found, beside it any words, units, currencies and
    punctuation but for those that change its value: `$5`, `6 \text{ cm}^2`, `90^\circ`, `It takes 5 days`, `x = 8`,
    `Total: 48 + 24 = 72`, not `2 million`, `negative 5`, `5 squared`, `5x`, `5!`.

    >>> only_number("3^{4}"), only_number("3_4"), only_number(r"2\sqrt{3}")
    (Number(value=Fraction(81, 1), is_percentage=False), None, None)
    """
    if len(text) > MAX_CHARACTERS:
        return None
    *left, text = _EQUALS.split(_laid_out(text))
    if not all(_NAME.fullmatch(side) or _DERIVATION.fullmatch(side) for side in left):
        return None
    for pattern, replacement in _HARMLESS:
        text = pattern.sub(replacement, text)
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1 or _CHANGED.search(text) or not _is_alone(matches[0]):
        return None
    return _parse(matches[0])


def is_prose(text: str) -> bool:
    """Whether `text` is sentences around numbers, such as a worked solution, rather than an answer alone."""
    return len(text.strip()) > _SHORT_TEXT and has_words(text)


def has_words(text: str) -> bool:
    """Whether `text` is worded as a sentence is, however short."""
    words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\(?:begin|end)\s*\{\w*\}|\\[A-Za-z]+", " ", text))
    return len(words) >= _PROSE_WORDS


def _around_the_last_digit(text: str) -> str:
    last_digit = max(text.rfind(digit) for digit in string.digits)
    return text[max(0, last_digit - _BEFORE) : last_digit + _AFTER] if last_digit >= 0 else ""


def _last_match(text: str) -> re.Match[str] | None:
    matches = (one for one in _NUMBER.finditer(text) if not text.endswith(("^", "^{", "_", "_{"), 0, one.start()))
    last = deque(matches, maxlen=1)
    return last[0] if last else None


def _spelt_plainly(text: str) -> str:
    text = _GROUP_BLANK.sub("", text)
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    return text


def _laid_out(text: str) -> str:
    r"""`text` on one line, spelt plainly, with the words of \text{} and without commands of layout."""
    text = _EXPONENT_BRACES.sub(r"^\1", _spelt_plainly(text))
    while (unwrapped := _TEXT.sub(r" \1 \2", text)) != text:
        text = unwrapped
    for pattern, replacement in _LAYOUT:
        text = pattern.sub(replacement, text)
    return text


def _words_beside(match: re.Match[str]) -> tuple[list[str], list[str]]:
    return _WORD.findall(match.string[: match.start()]), _WORD.findall(match.string[match.end() :])


def _is_alone(match: re.Match[str]) -> bool:
    """Whether what stands beside a number leaves it what it is."""
    front, rear = match.string[: match.start()], match.string[match.end() :]
    before, behind = _words_beside(match)
    if front[-1:].isalpha() or front.endswith((".", ",")) or (rear[:1].isalpha() and not _may_be_glued(behind[0])):
        return False
    variables = [word for word in before if _is_letter(word) and word not in _ARTICLES]
    variables += [word for word in behind[:-1] if _is_letter(word) and word not in _ARTICLES | _UNIT_LETTERS]
    variables += [word for word in behind[-1:] if _is_letter(word) and word not in _UNIT_LETTERS]  # 5 days a week; 12 a
    if variables or _changes_value(before, behind, anywhere=[*before, *behind]):
        return False
    return all(map(_is_mark, _WORD.sub("", front + rear)))


def _changes_value(before: list[str], behind: list[str], *, anywhere: list[str]) -> bool:
    """Whether one of the words `before` or `behind` a number makes it another; of `anywhere`, at any place."""
    parts = {part.lower() for word in anywhere for part in re.split("['’-]", word)}
    return bool(
        parts & _CHANGING
        or {word.lower() for word in before[-1:]} & _CHANGING_NEXT
        or {word.lower() for word in behind[:1]} & _CHANGING_LAST
        or any(_CHANGING_SIGNS.search(word) or not all(map(str.isalpha, parts)) for word in anywhere)
    )


def _is_letter(word: str) -> bool:
    """Whether `word` is a letter of Latin, Greek or mathematical script, which stands for a variable or a unit."""
    return max(map(len, word.split("-"))) == 1 and not _is_other_script(word)


def _is_other_script(word: str) -> bool:
    return "\u0400" <= word[0] < "\U0001d400"


def _may_be_glued(word: str) -> bool:
    is_unit = word in _UNIT_LETTERS - {"K"} or word.lower() in _GLUED  # 5K is 5 thousand as well
    return is_unit or len(word) >= _LONG_WORD or _is_other_script(word)


def _is_mark(character: str) -> bool:
    return character in _PUNCTUATION or unicodedata.category(character) in _HARMLESS_CATEGORIES


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
