"""What the tools take for a number on their command lines."""

from __future__ import annotations

import argparse

import pytest
from argument_types import above_zero, not_negative


@pytest.mark.parametrize(("text", "number"), [("2.5", 2.5), ("5", 5.0), ("1e-3", 0.001)])
def test_a_finite_number_above_zero_is_taken(text: str, number: float) -> None:
    assert above_zero(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "inf", "-inf", "nan", "1e999", "many", ""])
def test_any_other_is_the_user_s_mistake(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a finite number above 0"):
        above_zero(text)


def test_a_whole_number_may_be_zero() -> None:
    assert (not_negative("0"), not_negative("17")) == (0, 17)


@pytest.mark.parametrize("text", ["-1", "1.0", "inf", "nan", "many", ""])
def test_what_is_negative_or_no_whole_number_is_the_user_s_mistake(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of at least 0"):
        not_negative(text)
