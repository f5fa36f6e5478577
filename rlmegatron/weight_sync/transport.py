"""What `publish` asks of a way to move weights; `hf_stream.py` is the general one.

In: nothing but the engine of this rank, if it leads one. Out: the engine's live parameters hold the learner's values.
Must never decide the order of operations around the transfer; `publish.py` does.
"""

from __future__ import annotations

from typing import Protocol

from rlmegatron.rollout.api import RolloutEngine


class Transport(Protocol):
    """One way from the training layout into the engines' live parameters."""

    @property
    def name(self) -> str:
        """As in weight_sync.transport."""

    def transfer(self, engine: RolloutEngine | None) -> None:
        """Collective over the world. A rank whose engine fails still takes part to the end, so that nobody waits for
        it, and raises then."""
