"""The plain records that travel between the parts of the loop: prompts, samples and groups of samples.

In and out: immutable dataclasses of Python values. Must never import torch, numpy or any other package of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw of one data row: `id` is unique within a run, so equal texts drawn twice stay two prompts."""

    id: int
    token_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]
    source: str
    """Where the row came from, as `file line N`, for error messages."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that an engine sent tokens to: `data` holds [num_tokens, num_layers, top_k] int16 in native order.

    The tokens are those of prompt and answer but for the last, which the engine never reads; the layers are those that
    have experts. Experts have their global numbers.
    """

    data: bytes
    num_tokens: int
    num_layers: int
    top_k: int

    def __post_init__(self) -> None:
        size = 2 * self.num_tokens * self.num_layers * self.top_k
        assert len(self.data) == size, f"{len(self.data)} bytes of experts, must be {size}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to one prompt, as the engine returned it; `token_ids` ends in EOS when `finish_reason` is "stop".

    `logprobs[i]` is the engine's log-probability (nats, at the sampling temperature) of `token_ids[i]`;
    `weight_versions[i]` is the version of the weights that chose it. `routed_experts` is there when it was asked for.
    """

    prompt_id: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """All answers to one prompt of one step."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    greedy_reward: float | None = None
    """Reward of the most likely answer, where an advantage asks for it (ReMax)."""
