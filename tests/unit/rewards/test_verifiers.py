"""The verifiers against hand-worked cases."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.rewards.api import Answer
from rlmegatron.rewards.exact import exact_answer
from rlmegatron.rewards.extract import final_answer
from rlmegatron.rewards.length import overlong
from rlmegatron.rewards.numeric import find_number, numeric_answer
from rlmegatron.rewards.pattern import regex
from rlmegatron.rewards.structure import tagged_format


def answer(response: str, *, reference: Any = None, finish_reason: Any = "stop", num_tokens: int = 1) -> Answer:
    return Answer("p", response, (7,) * num_tokens, finish_reason, {"answer": reference})


def test_exact_answer_strips_and_minds_case_by_default() -> None:
    assert exact_answer(answer(" Paris\n", reference="Paris")) == 1.0
    assert exact_answer(answer("paris", reference="Paris")) == 0.0
    assert exact_answer(answer("paris", reference="Paris"), ignore_case=True) == 1.0
    assert exact_answer(answer("Paris ", reference="Paris"), strip=False) == 0.0


def test_exact_answer_takes_numbers_and_lists_as_reference() -> None:
    assert exact_answer(answer("00012", reference="00012")) == 1.0
    assert exact_answer(answer("12", reference=12)) == 1.0
    assert exact_answer(answer("b", reference=["a", "b"])) == 1.0
    assert exact_answer(answer("c", reference=["a", "b"])) == 0.0


@pytest.mark.parametrize("reference", [None, 1.5, True, [], {"a": 1}])
def test_exact_answer_refuses_a_reference_that_is_no_text(reference: Any) -> None:
    with pytest.raises(ValueError, match="column 'answer' holds"):
        exact_answer(answer("x", reference=reference))


def test_exact_answer_that_was_cut_off_earns_nothing_when_a_stop_is_required() -> None:
    cut = answer("Paris", reference="Paris", finish_reason="length")
    assert exact_answer(cut) == 1.0
    assert exact_answer(cut, require_stop=True) == 0.0


def test_missing_answer_column_names_the_columns_there_are() -> None:
    with pytest.raises(ValueError, match=r"no column 'solution'; it has 'answer' \(set reward.args.answer_key\)"):
        exact_answer(answer("x"), answer_key="solution")


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("so \\boxed{1} and \\boxed{\\frac{1}{2}}.", "boxed", "\\frac{1}{2}"),
        ("\\boxed{never closed", "boxed", None),
        ("nothing", "boxed", None),
        ("steps\n#### 72\nmore", "hashes", "72"),
        ("<answer>a</answer><answer> b </answer>", "answer_tag", " b "),
        ("</answer>", "answer_tag", None),
        ("one\ntwo\n", "last_line", "two"),
        ("", "last_line", None),
        ("", "whole", ""),
    ],
)
def test_final_answer_is_found_where_it_stands(text: str, place: Any, expected: str | None) -> None:
    assert final_answer(text, place) == expected


@pytest.mark.parametrize(
    ("text", "value", "is_percentage"),
    [
        ("the result is 72.", Fraction(72), False),
        ("first 5, then -5", Fraction(-5), False),
        ("\u22125", Fraction(-5), False),
        ("3-5", Fraction(5), False),
        ("10 - 5", Fraction(5), False),
        ("x=-5", Fraction(-5), False),
        ("$1,234.50", Fraction(2469, 2), False),
        ("1{,}234", Fraction(1234), False),
        ("1,2,3", Fraction(3), False),
        ("2/3", Fraction(2, 3), False),
        ("1 1/2", Fraction(3, 2), False),
        ("-\\dfrac{3}{4}", Fraction(-3, 4), False),
        ("1\\frac{1}{2}", Fraction(3, 2), False),
        ("\\frac12", Fraction(1, 2), False),
        ("50\\%", Fraction(1, 2), True),
        ("1.5e-3", Fraction(3, 2000), False),
        ("3 \\times 10^{4}", Fraction(30000), False),
        (".5", Fraction(1, 2), False),
        ("7 is \\boxed{x = 8} not 9", Fraction(8), False),
        ("7 #### 8\n9", Fraction(8), False),
        ("7 ####\n8\n9", Fraction(8), False),
    ],
)
def test_numbers_are_read_in_every_usual_spelling(text: str, value: Fraction, is_percentage: bool) -> None:
    number = find_number(text)
    assert number is not None
    assert (number.value, number.is_percentage) == (value, is_percentage)


@pytest.mark.parametrize("text", ["", "none", "\\boxed{x} 5", "1/0", "1e999999999", "9" * 5000, "5 ####  \n"])
def test_text_without_a_usable_number_gives_none(text: str) -> None:
    assert find_number(text) is None


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_printed_number_is_read_back_exactly(value: Any) -> None:
    for text in (f"{value}", f"so {value:,}."):
        number = find_number(text)
        assert number is not None and number.value == Fraction(value)


def test_numeric_tolerance_is_absolute_or_relative() -> None:
    assert numeric_answer(answer("3.14", reference="3.14159"), abs_tol=0.01) == 1.0
    assert numeric_answer(answer("3.14", reference="3.14159")) == 0.0
    assert numeric_answer(answer("990", reference=1000), abs_tol=0.0, rel_tol=0.01) == 1.0
    assert numeric_answer(answer("989", reference=1000), abs_tol=0.0, rel_tol=0.01) == 0.0
    assert numeric_answer(answer("12345678901234567891", reference="12345678901234567890")) == 0.0


def test_a_percentage_equals_its_number_and_its_fraction() -> None:
    assert numeric_answer(answer("50%", reference=50)) == 1.0
    assert numeric_answer(answer("50%", reference=0.5)) == 1.0
    assert numeric_answer(answer("0.5", reference="50%")) == 1.0
    assert numeric_answer(answer("5%", reference="50%")) == 0.0


def test_numeric_reference_may_be_a_worked_solution() -> None:
    assert numeric_answer(answer("It is 72.", reference="48/2 = 24, 48+24 = 72\n#### 72")) == 1.0


@pytest.mark.parametrize("reference", [None, "x", True, float("nan"), [1]])
def test_numeric_reference_without_a_number_is_an_error(reference: Any) -> None:
    with pytest.raises(ValueError, match="column 'answer' holds .* finds no number"):
        numeric_answer(answer("5", reference=reference))


MORE_THAN_A_NUMBER = [
    "2516_8",
    r"2516_{\text{eight}}",
    r"2\sqrt{3}",
    r"\frac{5\pi}{6}",
    r"\frac{\pi}{6}",
    "2pi",
    "(3,4)",
    "(3,400)",
    r"\left(-3, 4\right)",
    "[0, 1)",
    "1,2,3",
    "3 or 4",
    r"5 \pm 2",
    "3:4",
    "x^2+1",
    "x^2 = 4",
    "x = 3, y = 4",
    "x > 5",
    "5x",
    "3+4i",
    "5!",
    "(-2)^2",
    "10\u2074",
    "10^10^10",
    "10^{10^{10}}",
    "9^99999999",
    "0^-1",
    "1/0",
    "10 - 5",
    "minus 5",
    "|5|",
    r"0.\overline{3}",
    "1 000 000",
]


@pytest.mark.parametrize("text", MORE_THAN_A_NUMBER)
def test_a_reference_that_is_no_plain_number_is_refused_wherever_it_stands(text: str) -> None:
    for reference in (text, f" {text}\n", f"\\boxed{{{text}}}", f"it follows from 7\n#### {text}"):
        with pytest.raises(ValueError, match="column 'answer' gives .* plain number .*; use exact_answer or") as caught:
            numeric_answer(answer("4", reference=reference))
        assert repr(text)[1:-1] in str(caught.value)


@pytest.mark.parametrize("text", MORE_THAN_A_NUMBER)
@pytest.mark.parametrize("mark", ["\\boxed{{{}}}", "#### {}"])
def test_a_response_that_marks_more_than_a_number_earns_nothing(text: str, mark: str) -> None:
    """Whatever its last digits are."""
    assert find_number(mark.format(text)) is None
    for last in re.findall("[0-9]+", text)[-1:]:
        assert numeric_answer(answer(mark.format(text), reference=last)) == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42.", 42),
        ("$42$", 42),
        (r"\$1,234.50", Fraction(2469, 2)),
        ("- 7", -7),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("1/2", Fraction(1, 2)),
        (r"50\%", Fraction(1, 2)),
        ("10^4", 10_000),
        ("2^{10}", 1024),
        ("10^{-3}", Fraction(1, 1000)),
        ("-2^2", -4),
        (r"3 \times 10^{4}", 30_000),
        (r"6 \text{ cm}", 6),
        (r"6\text{ cm}^2", 6),
        (r"6\,\mathrm{cm}^{2}", 6),
        (r"6\text{ m}/\text{s}", 6),
        ("60 km/h", 60),
        ("12 cm\u00b2", 12),
        (r"90^\circ", 90),
        (r"\text{5 apples}", 5),
        ("about 5 apples", 5),
        ("5 \u5143", 5),
        ("x = 8", 8),
        ("x_1 = 8", 8),
        ("f(3) = 8", 8),
        (r"\text{total} = \$8", 8),
        ("48 + 24 = 72 clips", 72),
        (r"x \approx 3.14", Fraction(157, 50)),
        ("**72**", 72),
        (r"\left(5\right)", 5),
    ],
)
def test_a_number_may_stand_beside_its_unit_its_name_and_how_it_was_found(text: str, value: Fraction) -> None:
    for marked in (f"\\boxed{{{text}}}", f"#### {text}"):
        number = find_number(marked)
        assert number is not None and number.value == value
        assert numeric_answer(answer(marked, reference=text)) == 1.0
        assert numeric_answer(answer(marked, reference=float(value))) == 1.0
        assert numeric_answer(answer(marked, reference=float(value) + 1)) == 0.0


def test_the_last_number_of_prose_is_taken() -> None:
    solution = "She sold 48/2 = 24 clips in May, so together she sold 48+24 = 72 of them."
    assert numeric_answer(answer("72", reference=solution)) == 1.0
    assert numeric_answer(answer("24", reference=solution)) == 0.0
    assert numeric_answer(answer("of 3 boxes each holds 10^2", reference="100")) == 1.0


def test_a_power_is_its_value_and_an_exponent_or_an_index_is_no_answer() -> None:
    assert numeric_answer(answer(r"\boxed{10^4}", reference="10000")) == 1.0
    assert numeric_answer(answer(r"\boxed{4}", reference="10^{4}")) == 0.0
    assert find_number("the area is 12 cm^2") == find_number("12")
    assert find_number("in base eight 2516_8") == find_number("2516")


@pytest.mark.timeout(60)
def test_powers_are_bounded() -> None:
    for text in ("9^999999999", "9" * 300 + "^400", "10^10^10", "1^" * 10**5 + "1", "2^{999999999}" * 10**4):
        assert find_number(text) is None
    assert find_number("2^400") is not None


@pytest.mark.parametrize(
    "text",
    ["1" * 10**6, "1,111" * 10**5, "1 " * 10**6, "1" + " " * 10**6 + "2", "\\frac{1" * 10**5, "\\boxed{" * 10**5 + "1"],
)
@pytest.mark.timeout(60)  # linear time is a fraction of a second, anything above it hours
def test_hostile_responses_cost_linear_time(text: str) -> None:
    find_number(text)
    tagged_format(answer(text))
    exact_answer(answer(text, reference="1"), take="boxed")


def test_regex_searches_or_matches_the_whole_response() -> None:
    assert regex(answer("a1b"), pattern=r"\d") == 1.0
    assert regex(answer("a1b"), pattern=r"\d", mode="fullmatch") == 0.0
    assert regex(answer(" A\nB "), pattern="a.b", mode="fullmatch", ignore_case=True, strip=True) == 1.0
    assert regex(answer("A\nB"), pattern="A.B", dot_all=False) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> tail", 0.0),
        ("head <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> between <answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_format_demands_the_sections_in_order_and_nothing_else(response: str, expected: float) -> None:
    assert tagged_format(answer(response)) == expected


def test_format_accepts_a_response_whose_first_tag_is_in_the_prompt() -> None:
    assert tagged_format(answer("a</think><answer>b</answer>"), opened=True) == 1.0
    assert tagged_format(answer("a</think><answer>b</answer>")) == 0.0
    assert tagged_format(answer("<plan>x</plan>"), sections="plan") == 1.0


def test_overlong_penalty_is_dapo_equation_13() -> None:
    # L_max 100, L_cache 20: 0 up to 80 tokens, (80 - n) / 20 up to 100, then -1.
    expected = {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 100: -1.0, 150: -1.0}
    for num_tokens, reward in expected.items():
        given_answer = answer("x", num_tokens=num_tokens, finish_reason="length")
        assert overlong(given_answer, max_tokens=100, buffer_tokens=20) == pytest.approx(reward)
