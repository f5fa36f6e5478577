"""A run: what the loop works with on one rank.

In: collaborators, built by `build.py`. Out: `Run`. Must never build any of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlmegatron.checkpoint.directory import CheckpointDirectory
from rlmegatron.config.schema import RunConfig
from rlmegatron.data.prompts import PromptStream
from rlmegatron.distributed.world import World
from rlmegatron.learner.learner import Learner
from rlmegatron.metrics.sinks import FanOut
from rlmegatron.models.stream import TensorStream
from rlmegatron.rewards.judge import Judge
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.collect import Rollout
from rlmegatron.trainer.credit import Credit
from rlmegatron.trainer.update import Objectives
from rlmegatron.types import Prompt
from rlmegatron.weight_sync.transport import Transport
from rlmegatron.weight_sync.verify import Verifier


@dataclass
class Run:
    """Everything the loop works with on this rank; `prompts` and `sinks` are held by rank 0 alone."""

    cfg: RunConfig
    world: World
    learner: Learner
    rollout: Rollout
    reward: Judge
    stream: TensorStream
    transport: Transport
    verifier: Verifier | None
    credit: Credit
    objectives: Objectives
    adapted: Adapted
    dp_ranks: Sequence[int]
    eval_sets: Mapping[str, Sequence[Prompt]]
    checkpoints: CheckpointDirectory
    prompts: PromptStream | None
    stop: threading.Event
    sinks: FanOut | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.cfg.directory)

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage compares with the most likely answer."""
        return "greedy_rewards" in self.credit.piece.inputs

    def say(self, line: str) -> None:
        """One line on the console of rank 0."""
        say(self.world, line)


def say(world: World, line: str) -> None:
    """One line on the console of rank 0, whoever calls."""
    if world.is_lead:
        print(line, flush=True)
