r"""The verifier `numeric_answer`: the response must give the reference's number, within a tolerance.

In: an `Answer` whose row holds a number or a text with one. Out: 1.0 or 0.0. Must never import torch. It is for plain
numbers: roots, tuples, intervals and numerals of another base are refused, not compared by their last digits.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

from rlmegatron.rewards.api import Answer
from rlmegatron.rewards.extract import after_hashes, last_boxed
from rlmegatron.rewards.read_number import Number, has_words, is_prose, last_number, only_number, sentence_number

Take = Literal["auto", "boxed", "hashes", "last"]
"""Where in a text its number stands."""


def numeric_answer(
    answer: Answer,
    *,
    answer_key: str = "answer",
    take: Take = "auto",
    abs_tol: float = 1e-6,
    rel_tol: float = 0.0,
    require_stop: bool = False,
) -> float:
    """1.0 if the response's number is within max(abs_tol, rel_tol * |reference|) of the reference, else 0.0.

    answer_key: column of the reference: a number, or a text whose marked place ('auto') must hold one number. Without
        a mark, a short text must be one number; of prose, such as a worked solution, the last number is taken.
    take: 'boxed' (the number in the last \\boxed{}), 'hashes' (after the last '####'), 'last' (last number of the
        response), or 'auto': the first of these whose mark occurs in the response.
    Understands 1,234.5, -3, 2/3, 1 1/2, \\frac{2}{3}, 50%, 1e-3, 3 \\times 10^4, 2^{10}, $5 and the Unicode minus. If
    only one of the two numbers is a percentage, 50% equals both 50 and 0.5. A response without a number earns 0.0, and
    so does one whose marked place holds more than one number, or what makes it another: 2\\sqrt{3}, (3,4), 1_8,
    2 million; of a sentence there the last number is taken.
    Raises ValueError if the column is missing, holds no number or more than a plain one.
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


def find_number(text: str, take: Take = "auto") -> Number | None:
    """The number that `text` gives as its answer, or None.

    Without a mark the last one; of a marked place the only one, and of a sentence there the last one.
    """
    part, mark = _answer_part(text, take)
    if part is None:
        return None
    if mark is None:
        return last_number(part)
    number = only_number(part)
    is_sentence = has_words(part) if mark == "hashes" else is_prose(part)
    return sentence_number(part) if number is None and is_sentence else number


def _answer_part(text: str, take: Take) -> tuple[str | None, Literal["boxed", "hashes"] | None]:
    """The part of `text` that holds its answer, if there is one, and the mark that says so."""
    if take == "boxed" or (take == "auto" and ("\\boxed{" in text or "\\fbox{" in text)):
        return last_boxed(text), "boxed"
    if take == "hashes" or (take == "auto" and "####" in text):
        return after_hashes(text), "hashes"
    return text, None


def _reference(value: object, answer_key: str) -> Number:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return Number(Fraction(repr(value)))
    part, mark = _answer_part(value, "auto") if isinstance(value, str) else (None, None)
    if part is None or not any("0" <= letter <= "9" for letter in part):
        raise ValueError(f"column {answer_key!r} holds {value!r:.80}, in which numeric_answer finds no number")
    number = last_number(part) if mark is None and is_prose(part) else only_number(part)
    if number is None:
        raise ValueError(
            f"column {answer_key!r} gives {part!r:.80} as the answer; numeric_answer is for one plain number (42, 1/2, "
            "10^{4}, 50%, 6 \\text{ cm}); use exact_answer or a function of your own (reward.name: "
            "'package.module:function') for others"
        )
    return number


def _agree(given: Number, reference: Number, *, abs_tol: float, rel_tol: float) -> bool:
    pairs = [(given.value, reference.value)]
    if given.is_percentage and not reference.is_percentage:
        pairs.append((given.value * 100, reference.value))
    elif reference.is_percentage and not given.is_percentage:
        pairs.append((given.value, reference.value * 100))
    absolute, relative = Fraction(abs_tol), Fraction(rel_tol)
    return any(abs(one - other) <= max(absolute, relative * abs(other)) for one, other in pairs)
