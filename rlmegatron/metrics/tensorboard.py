"""Owns writing metrics as TensorBoard event files.

In: final numbers; out: scalars in a directory, in which a resumed run hides the steps it repeats. Must never import
tensorboard before a sink is built: it is slow to load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlmegatron.metrics.optional import TENSORBOARD, require


class TensorBoardSink:
    """One scalar per metric and step, on disk when `write` returns."""

    def __init__(self, directory: Path | str, *, resumed_from: int | None) -> None:
        """Open an event file; resuming from step k makes TensorBoard drop older events of steps above k.

        A fresh run (None) drops those of every step.
        """
        module = require(TENSORBOARD, module="torch.utils.tensorboard")
        purge_step = 0 if resumed_from is None else resumed_from + 1
        self._writer = module.SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add every number at `step`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
