"""The few numbers that a run adapts as it goes, besides weights: saved with checkpoints and equal on every rank.

In: what was measured in a step. Out: the numbers of the next one. Must never communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmegatron.algorithms.kl_control import adapted
from rlmegatron.algorithms.value_scale import ReturnScale
from rlmegatron.config.algorithm import KLConfig


@dataclass
class Adapted:
    """`kl_coef`: weight of the divergence from the reference. `return_scale`: how the critic's targets are scaled."""

    kl_coef: float
    return_scale: ReturnScale | None

    def adapt_kl(self, config: KLConfig, *, measured: float | None, num_samples: int) -> None:
        """Move the weight towards what keeps the divergence at its target; nothing without one, or a measurement."""
        if config.target is not None and measured is not None and num_samples:
            self.kl_coef = adapted(
                self.kl_coef,
                measured=measured,
                target=config.target,
                num_samples=num_samples,
                horizon=config.horizon,
            )

    def state(self, config: KLConfig) -> dict[str, Any]:
        """Plain JSON values; None for what this run does not adapt."""
        scale = None if self.return_scale is None else self.return_scale.state()
        return {"kl_coef": None if config.target is None else self.kl_coef, "return_scale": scale}

    def load_state(self, state: Mapping[str, Any], config: KLConfig) -> None:
        """Go on from a checkpoint; a weight that is not adapted, or was not, is today's configuration's.

        Raises ValueError where the critic would be taken to speak in other units than it learnt.
        """
        if config.target is not None and state["kl_coef"] is not None:
            self.kl_coef = state["kl_coef"]
        saved = state["return_scale"]
        if (saved is None) != (self.return_scale is None):
            was, now = (str(scale is not None).lower() for scale in (saved, self.return_scale))
            raise ValueError(f"critic.normalize_returns: was {was} before the checkpoint and is {now}; set it to {was}")
        if saved is not None:
            self.return_scale = ReturnScale.from_state(saved)
