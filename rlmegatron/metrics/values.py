"""Owns the values that metrics are made of: each carries how it is reduced over micro-batches, steps and ranks.

In: plain numbers or tensors; out: small frozen records of floats that pickle, merge in any grouping, and give their
final numbers. Must never import torch.distributed, the algorithms, or know what a metric is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Metric(Protocol):
    """What every value of this module can do; `merge` is associative up to rounding."""

    def merge(self, other: Self) -> Self:
        """This value and `other`, which comes later or from a higher rank, as one."""
        ...

    def values(self, name: str) -> dict[str, float]:
        """The final numbers under `name`; none when nothing was counted, so that absent never reads as NaN."""
        ...


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount that adds up over ranks."""

    total: float

    def merge(self, other: Sum) -> Sum:
        """Add."""
        return Sum(self.total + other.total)

    def values(self, name: str) -> dict[str, float]:
        """One number: the total."""
        return {name: self.total}


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over everything counted, however unevenly ranks and micro-batches hold it."""

    total: float
    count: float

    @classmethod
    def of(cls, data: Tensor | Iterable[float], mask: Tensor | None = None) -> Mean:
        """Mean of all entries of `data`, or of those where `mask` (same shape, bool) is True."""
        summary = _summarise(data, mask)
        return cls(summary.total, summary.num_entries)

    def merge(self, other: Mean) -> Mean:
        """Add totals and counts."""
        return Mean(self.total + other.total, self.count + other.count)

    def values(self, name: str) -> dict[str, float]:
        """One number: the mean."""
        return {name: self.total / self.count} if self.count else {}


@dataclass(frozen=True, slots=True)
class Max:
    """The largest entry; -inf stands for none, and NaN wins so that it is seen."""

    largest: float

    @classmethod
    def of(cls, data: Tensor | Iterable[float], mask: Tensor | None = None) -> Max:
        """Largest of all entries of `data`, or of those where `mask` (same shape, bool) is True."""
        return cls(_summarise(data, mask).largest)

    def merge(self, other: Max) -> Max:
        """The larger."""
        return Max(_largest((self.largest, other.largest)))

    def values(self, name: str) -> dict[str, float]:
        """One number: the largest entry."""
        return {name: self.largest} if self.largest != -math.inf else {}


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest entry; +inf stands for none, and NaN wins so that it is seen."""

    smallest: float

    @classmethod
    def of(cls, data: Tensor | Iterable[float], mask: Tensor | None = None) -> Min:
        """Smallest of all entries of `data`, or of those where `mask` (same shape, bool) is True."""
        return cls(_summarise(data, mask).smallest)

    def merge(self, other: Min) -> Min:
        """The smaller."""
        return Min(_smallest((self.smallest, other.smallest)))

    def values(self, name: str) -> dict[str, float]:
        """One number: the smallest entry."""
        return {name: self.smallest} if self.smallest != math.inf else {}


@dataclass(frozen=True, slots=True)
class Last:
    """A number that is the same everywhere or of which only the latest matters, such as a learning rate."""

    latest: float

    def merge(self, other: Last) -> Last:
        """The later one."""
        return other

    def values(self, name: str) -> dict[str, float]:
        """One number: the latest."""
        return {name: self.latest}


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and standard deviation (of the population: n, not n - 1)."""

    count: float
    total: float
    total_sq: float

    @classmethod
    def of(cls, data: Tensor | Iterable[float], mask: Tensor | None = None) -> Moments:
        """Moments of all entries of `data`, or of those where `mask` (same shape, bool) is True."""
        summary = _summarise(data, mask)
        return cls(summary.num_entries, summary.total, summary.total_sq)

    @property
    def variance(self) -> float:
        """Variance of the population; count must not be 0."""
        mean = self.total / self.count
        spread = self.total_sq / self.count - mean * mean
        # Not max(0, spread): that would turn NaN into 0.
        return 0.0 if spread < 0 else spread

    def merge(self, other: Moments) -> Moments:
        """Add counts, totals and squares."""
        return Moments(self.count + other.count, self.total + other.total, self.total_sq + other.total_sq)

    def values(self, name: str) -> dict[str, float]:
        """`name_mean` and `name_std`; `name/mean` and `name/std` when `name` ends in '/'."""
        if not self.count:
            return {}
        return {_join(name, "mean"): self.total / self.count, _join(name, "std"): math.sqrt(self.variance)}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, standard deviation, smallest and largest."""

    moments: Moments
    smallest: Min
    largest: Max

    @classmethod
    def of(cls, data: Tensor | Iterable[float], mask: Tensor | None = None) -> Distribution:
        """Distribution of all entries of `data`, or of those where `mask` (same shape, bool) is True."""
        count, total, total_sq, smallest, largest = _summarise(data, mask)
        return cls(Moments(count, total, total_sq), Min(smallest), Max(largest))

    def merge(self, other: Distribution) -> Distribution:
        """Merge part by part."""
        return Distribution(
            self.moments.merge(other.moments), self.smallest.merge(other.smallest), self.largest.merge(other.largest)
        )

    def values(self, name: str) -> dict[str, float]:
        """`name_mean`, `name_std`, `name_min`, `name_max`; with '/' in place of '_' when `name` ends in '/'."""
        bounds = self.smallest.values(_join(name, "min")) | self.largest.values(_join(name, "max"))
        return self.moments.values(name) | bounds


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - Var(target - forecast) / Var(target): 1 is a perfect forecast, 0 no better than the mean, below 0 worse."""

    count: float
    target_total: float
    target_total_sq: float
    error_total: float
    error_total_sq: float

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """Add all sums."""
        return ExplainedVariance(
            self.count + other.count,
            self.target_total + other.target_total,
            self.target_total_sq + other.target_total_sq,
            self.error_total + other.error_total,
            self.error_total_sq + other.error_total_sq,
        )

    def values(self, name: str) -> dict[str, float]:
        """One number; none when nothing was counted or the targets are all equal, which leaves nothing to explain."""
        if not self.count:
            return {}
        target = Moments(self.count, self.target_total, self.target_total_sq).variance
        error = Moments(self.count, self.error_total, self.error_total_sq).variance
        # What rounding leaves of a variance of 0 is not a variance.
        if target <= 1e-13 * self.target_total_sq / self.count:
            return {}
        return {name: 1 - error / target}


def from_parts(reduction: str, parts: Sequence[float]) -> Metric:
    """The metric of a loss statistic: `reduction` and `parts` as an algorithm's Stat holds them, as plain floats."""
    kinds: dict[str, type[Sum] | type[Mean] | type[Max] | type[Min] | type[ExplainedVariance]] = {
        "sum": Sum,
        "mean": Mean,
        "max": Max,
        "min": Min,
        "explained_variance": ExplainedVariance,
    }
    assert reduction in kinds, f"no metric for reduction {reduction!r}; there are {', '.join(kinds)}"
    return kinds[reduction](*parts)


class _Summary(NamedTuple):
    """What any metric may need to know of the entries it counts."""

    num_entries: int
    total: float
    total_sq: float
    smallest: float
    largest: float


def _summarise(data: Tensor | Iterable[float], mask: Tensor | None) -> _Summary:
    """Summary of the counted entries in double precision; a tensor stays on its device until it is five numbers."""
    if mask is not None:
        if not isinstance(data, _TensorLike):
            raise ValueError("a mask needs data that is a tensor")
        if data.shape != mask.shape:
            raise ValueError(f"mask has shape {list(mask.shape)}, but the data has {list(data.shape)}")
        data = data[mask]
    if not isinstance(data, _TensorLike):
        entries = [float(x) for x in data]
        squares = math.fsum(x * x for x in entries)
        return _Summary(len(entries), math.fsum(entries), squares, _smallest(entries), _largest(entries))
    kept = data.detach().double()
    count, total, squares = kept.numel(), kept.sum().item(), kept.square().sum().item()
    if not count:
        return _Summary(0, 0.0, 0.0, math.inf, -math.inf)
    return _Summary(count, total, squares, kept.min().item(), kept.max().item())


@runtime_checkable
class _TensorLike(Protocol):
    """A torch tensor, without importing torch to ask."""

    shape: Any

    def detach(self) -> Any: ...

    def __getitem__(self, index: Any) -> Any: ...


def _largest(entries: Sequence[float]) -> float:
    return math.nan if any(math.isnan(x) for x in entries) else max(entries, default=-math.inf)


def _smallest(entries: Sequence[float]) -> float:
    return -_largest([-x for x in entries])


def _join(name: str, suffix: str) -> str:
    return name + suffix if name.endswith("/") else f"{name}_{suffix}"
