"""What the loop asks of a rollout engine; `sglang_engine.py` is the one implementation.

In: prompts as token ids. Out: `Sample`s. Must never import torch.distributed, megatron or sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlmegatron.types import Sample


class EngineError(RuntimeError):
    """An engine did not do what was asked; the message names its log."""


class EngineDied(EngineError):
    """An engine's process has ended; the message ends with its log's last lines."""

    expected = True
    """The message says it all: a report needs no traceback of ours."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to sample: `seed` alone (not rank, order or batch) decides the sample at temperature > 0."""

    prompt_id: int
    index: int
    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How every request of one call is sampled; temperature 0 means greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    routed_experts: bool = False
    """Whether answers tell which experts their tokens went to; the engine must have been started for it."""


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """Which of a model's `num_layers` layers have experts, counted from 0, and how many a token goes to in each."""

    num_layers: int
    layers: tuple[int, ...]
    top_k: int


class RolloutEngine(Protocol):
    """One engine as its lead rank sees it."""

    tensor: int
    """Ranks of the engine (its TP)."""

    @property
    def incarnation(self) -> int:
        """Another number after every restart: what the engine's workers were told before is forgotten."""

    def wait_ready(self) -> None:
        """Wait until the engine has started; raises EngineError with the end of its log."""

    def alive(self) -> bool:
        """Whether the engine's process runs."""

    def restart(self) -> None:
        """Replace a dead engine; the new one serves only after a publish."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Sample]:
        """Answers in the order of the requests; raises EngineError."""

    def sleep(self) -> None:
        """Free the device memory (no-op on a CPU); the engine refuses to generate until `wake`."""

    def wake(self, *, weights: bool = False, kv_cache: bool = False) -> None:
        """Take device memory for the named parts again."""

    def begin_weight_update(self) -> None:
        """Stop serving and open a weight update."""

    def update_weights(self, named_tensors: Sequence[tuple[str, Any]], *, load_format: str | None = None) -> None:
        """Load one bucket of full Hugging Face tensors, or hand them to a loader of ours named by `load_format`."""

    def end_weight_update(self, *, version: int) -> None:
        """Close the update, flush the KV cache and stamp `version` on every token generated from now on."""

    def distrust_weights(self) -> None:
        """Refuse to generate until a publish succeeds: one has failed here or in another engine."""

    def shutdown(self) -> None:
        """End the engine's processes; safe to call twice."""
