"""Owns what a loss returns: a sum to differentiate, and statistics that carry how they are reduced.

In: per-token tensors; out: `LossTerm` and `Stat`, all still on the device so that nothing waits for it. Must never
import torch.distributed, the configuration, or the metrics package (which reads `reduction` and `parts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "mean", "max", "min", "explained_variance"]


@dataclass(frozen=True, slots=True)
class Stat:
    """One statistic of one micro-batch, still unreduced: `parts` [P] float64, detached.

    sum: (total); mean: (total, count); max: (largest, -inf when nothing counts); min: (smallest, inf when nothing
    counts); explained_variance: (count, sum and sum of squares of the returns, sum and sum of squares of returns -
    values).
    """

    reduction: Reduction
    parts: Tensor

    def merge(self, other: Stat) -> Stat:
        """The statistic of both micro-batches together; `other` must have the same reduction."""
        assert self.reduction == other.reduction, f"cannot merge {self.reduction} with {other.reduction}"
        if self.reduction == "max":
            return Stat("max", torch.maximum(self.parts, other.parts))
        if self.reduction == "min":
            return Stat("min", torch.minimum(self.parts, other.parts))
        return Stat(self.reduction, self.parts + other.parts)


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A part of a loss: `total` (scalar) is the weighted SUM over this micro-batch's counted tokens, never a mean.

    The update divides once by the count over all micro-batches and data-parallel ranks of the optimizer step (see
    `aggregation`), so the gradient depends on neither.
    """

    total: Tensor
    stats: Mapping[str, Stat] = field(default_factory=dict)

    def __add__(self, other: LossTerm) -> LossTerm:
        """Both terms as one; raises ValueError when both report a statistic of the same name."""
        twice = self.stats.keys() & other.stats.keys()
        if twice:
            raise ValueError(f"two terms of one loss report the same statistic: {', '.join(sorted(twice))}")
        return LossTerm(self.total + other.total, {**self.stats, **other.stats})


def mean_stat(values: Tensor, counted: Tensor) -> Stat:
    """Mean of `values` [T] over the tokens where `counted` [T] is True; what is not counted may be NaN."""
    kept = torch.where(counted, values.detach().double(), 0.0)
    return Stat("mean", torch.stack([kept.sum(), counted.sum().double()]))


def max_stat(values: Tensor, counted: Tensor) -> Stat:
    """Largest of `values` [T] over the tokens where `counted` [T] is True."""
    kept = torch.where(counted, values.detach().double(), -torch.inf)
    return Stat("max", torch.cat([kept, kept.new_full((1,), -torch.inf)]).amax().reshape(1))


def min_stat(values: Tensor, counted: Tensor) -> Stat:
    """Smallest of `values` [T] over the tokens where `counted` [T] is True."""
    return Stat("min", -max_stat(-values, counted).parts)


def explained_variance_stat(*, values: Tensor, returns: Tensor, counted: Tensor) -> Stat:
    """Parts of 1 - Var(returns - values) / Var(returns) over the counted tokens; all [T]."""
    target = torch.where(counted, returns.detach().double(), 0.0)
    error = torch.where(counted, (returns - values).detach().double(), 0.0)
    count = counted.sum().double()
    parts = [count, target.sum(), target.square().sum(), error.sum(), error.square().sum()]
    return Stat("explained_variance", torch.stack(parts))


def weighted_sum(per_token: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights [T] * per_token [T], where a token of weight 0 adds nothing, even if it is NaN."""
    return (weights * torch.where(weights > 0, per_token, torch.zeros_like(per_token))).sum()
