"""Owns the running scale of returns, by which a critic learns numbers of size 1 whatever the unit of the reward.

In: moments of a step's returns, summed over all ranks, so that every rank holds the same scale; out: a new scale, and
tensors in normalised units or back. Must never import torch.distributed or the configuration.
"""

# T tokens

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from torch import Tensor

from rlmegatron.algorithms.shapes import expect

SMALLEST_STD = 0.1
"""Floor of the standard deviation, that of MAPPO's `ValueNorm` (variance 0.01): when all returns so far were equal,
one unit of reward is at most 10 normalised units, not a number without bound."""


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and mean square of returns, debiased, as `ValueNorm` of MAPPO (arXiv 2103.01955).

    Before the first update it is the identity. Then x <- decay x + (1 - decay) (mean over the step), divided by
    `weight`, the same average of 1, which takes out that it started at 0 (as in Adam). Each step weighs the same,
    however many tokens it has. MAPPO's decay, 0.99999 per optimizer step, is for millions of steps; with one update
    per training step the default 0.99 looks back about 100 steps, and so follows a policy whose rewards rise over some
    hundreds.

    Normalised values belong to the scale they were made with: turn values back with the one in use when the critic
    computed them, then update, then normalise returns with the new one. Old values stay as the critic gave them, as in
    MAPPO: the clip of the value loss bounds how far its output moves, and in a new unit it would seem to have moved.

    >>> import torch
    >>> scale = ReturnScale(decay=0.5).update(torch.tensor([2.0, 12.0, 104.0]))
    >>> scale.center, scale.std
    (6.0, 4.0)
    >>> scale.normalize(torch.tensor([10.0, 2.0])).tolist()
    [1.0, -1.0]
    """

    decay: float = 0.99
    mean: float = 0.0
    """Average of the steps' mean returns, not yet divided by `weight`; in the unit of the reward."""
    mean_sq: float = 0.0
    """Average of the steps' mean squared returns, not yet divided by `weight`."""
    weight: float = 0.0
    """1 - decay^(number of updates): 0 before the first."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the decay lies in [0, 1) and the rest could come from updates."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")
        if not (math.isfinite(self.mean) and 0 <= self.mean_sq < math.inf and 0 <= self.weight <= 1):
            raise ValueError(f"not a scale: mean {self.mean}, mean_sq {self.mean_sq}, weight {self.weight}")

    @property
    def center(self) -> float:
        """Debiased mean of the returns; 0 before the first update."""
        return self.mean / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """Debiased standard deviation (n) of the returns, at least SMALLEST_STD; 1 before the first update."""
        if not self.weight:
            return 1.0
        variance = self.mean_sq / self.weight - self.center**2
        return math.sqrt(max(variance, SMALLEST_STD**2))

    def update(self, moments: Tensor) -> ReturnScale:
        """The scale after one more step; moments: [3] from `masked_moments` of its returns, summed over all ranks.

        A step without counted tokens leaves the scale as it is. Raises ValueError for moments that are not finite.
        """
        expect("3", moments=moments)
        count, total, total_sq = moments.tolist()
        if not all(map(math.isfinite, (count, total, total_sq))) or count < 0:
            raise ValueError(f"moments of returns must be finite, got count {count}, sum {total}, squares {total_sq}")
        if count == 0:
            return self
        new = 1 - self.decay
        return replace(
            self,
            mean=self.decay * self.mean + new * (total / count),
            mean_sq=self.decay * self.mean_sq + new * (total_sq / count),
            weight=self.decay * self.weight + new,
        )

    def normalize(self, x: Tensor) -> Tensor:
        """(x - center) / std, elementwise; from the unit of the reward to normalised units, in the dtype of `x`."""
        return ((x.double() - self.center) / self.std).to(x.dtype)

    def denormalize(self, x: Tensor) -> Tensor:
        """x * std + center, elementwise; from normalised units to the unit of the reward, in the dtype of `x`."""
        return (x.double() * self.std + self.center).to(x.dtype)

    def state(self) -> dict[str, float]:
        """Plain numbers for JSON, which `from_state` turns back exactly."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> ReturnScale:
        """The scale that `state` was taken from; raises ValueError unless it has exactly those names."""
        names = {field.name for field in fields(cls)}
        if state.keys() != names:
            raise ValueError(f"state of a ReturnScale must have {sorted(names)}, got {sorted(state)}")
        return cls(**{name: float(state[name]) for name in names})
