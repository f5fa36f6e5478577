"""The verifiers against hand-worked cases."""

from __future__ import annotations

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
