"""Holds what a piece returned to what its form promises: a function of the user's own may return anything.

In: a piece, what it returned, and a tensor of the right shape. Out: that, or ValueError that names the key and the
function. Must never change a value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm
from rlmegatron.algorithms.table import Piece


def promised_advantages(piece: Piece, returned: Any, *, like: Tensor) -> Tensor:
    """`returned` if it is a finite tensor of the shape of `like`, one advantage for each answer."""
    return _finite(piece, returned, like, what="it")


def promised_pair(piece: Piece, returned: Any, *, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`returned` if it is (advantages [T], returns [T]), both finite where `mask` [T] is true."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(f"{_key(piece)} must return a pair (advantages, returns), got {_described(returned)}")
    advantages, returns = returned
    return (
        _finite(piece, advantages, mask, what="the first of the pair", mask=mask),
        _finite(piece, returns, mask, what="the second of the pair", mask=mask),
    )


def promised_loss(piece: Piece, returned: Any) -> LossTerm:
    """`returned` if it is a `LossTerm` with a scalar."""
    if not isinstance(returned, LossTerm):
        raise ValueError(
            f"{_key(piece)} must return a LossTerm (rlmegatron.algorithms.loss_term), the sum over its tokens, "
            f"got {_described(returned)}"
        )
    if not isinstance(returned.total, Tensor) or returned.total.dim():
        raise ValueError(f"{_key(piece)} must return a LossTerm with one number, got {_described(returned.total)}")
    return returned


def _finite(piece: Piece, value: Any, like: Tensor, *, what: str, mask: Tensor | None = None) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise ValueError(
            f"{_key(piece)} returned {_described(value)}: {what} must be a tensor of shape {tuple(like.shape)}"
        )
    counted = value if mask is None else value[mask]
    if not counted.isfinite().all():
        raise ValueError(f"{_key(piece)}: {what} must be finite, but holds {_first_odd(counted)}")
    return value


def _first_odd(values: Tensor) -> float:
    return float(values[~values.isfinite()][0])


def _key(piece: Piece) -> str:
    return f"algorithm.{piece.kind}: {piece.name!r}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"
