"""What a user's function returned is used as it is, or refused by the name of the function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlmegatron.algorithms.loss_term import LossTerm
from rlmegatron.algorithms.promised import promised_advantages, promised_loss, promised_pair
from rlmegatron.algorithms.table import FORMS, Piece

ONES = torch.ones(3)
BAD = torch.tensor([1.0, math.nan, -math.inf])


def piece(kind: str) -> Piece:
    return Piece(kind, "mine:f", FORMS[kind][0], print, frozenset())


def test_what_is_right_is_passed_on_as_it_is() -> None:
    assert promised_advantages(piece("advantage"), ONES, like=torch.zeros(3)) is ONES
    mask = torch.tensor([True, False, False])
    advantages, returns = promised_pair(piece("advantage"), (BAD, ONES), mask=mask)
    assert advantages is BAD and returns is ONES  # what is not counted may hold anything
    term = LossTerm(torch.tensor(2.0))
    assert promised_loss(piece("policy_loss"), term) is term


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "returned a float: it must be a tensor of shape (3,)"),
        (torch.tensor(1.0), "returned a tensor of shape (): it must be a tensor of shape (3,)"),
        (BAD, "it must be finite, but holds nan"),
    ],
)
def test_advantages_of_answers_are_one_finite_number_each(returned: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        promised_advantages(piece("advantage"), returned, like=ONES)
    assert str(refused.value) in (
        f"algorithm.advantage: 'mine:f' {message}",
        f"algorithm.advantage: 'mine:f': {message}",
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (ONES, "must return a pair (advantages, returns), got a tensor of shape (3,)"),
        ((ONES,), "must return a pair (advantages, returns), got a tuple of 1"),
        ((ONES, None), "returned a NoneType: the second of the pair must be a tensor of shape (3,)"),
        ((BAD, ONES), ": the first of the pair must be finite, but holds nan"),
    ],
)
def test_advantages_of_tokens_come_with_returns(returned: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        promised_pair(piece("advantage"), returned, mask=ONES.bool())
    assert str(refused.value).removeprefix("algorithm.advantage: 'mine:f'").lstrip() == message


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.tensor(1.0), "must return a LossTerm .*got a tensor of shape \\(\\)"),
        (LossTerm(ONES), "must return a LossTerm with one number, got a tensor of shape \\(3,\\)"),
    ],
)
def test_a_loss_is_a_term(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.policy_loss: 'mine:f' {message}"):
        promised_loss(piece("policy_loss"), returned)
