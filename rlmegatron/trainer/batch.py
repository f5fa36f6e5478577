"""From judged groups on the engines' lead ranks to each data-parallel rank's batch and plan.

In: groups, on whatever ranks hold them. Out: a `StepBatch`: facts of all samples on every rank, tokens of its own
samples alone. Every rank computes the same plan from the same facts; tokens travel once, point to point.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmegatron.data.batch import TrainBatch, assemble
from rlmegatron.data.packing import plan_batches
from rlmegatron.distributed.world import World
from rlmegatron.rewards.api import RESERVED_PART
from rlmegatron.types import Sample, SampleGroup


@dataclass(frozen=True, slots=True, order=True)
class SampleFacts:
    """What every rank knows of a sample; the order of the fields is the order of the global batch."""

    prompt_id: int
    index: int
    num_prompt_tokens: int
    num_answer_tokens: int
    reward: float
    greedy_reward: float
    cut_off: bool
    parts: tuple[tuple[str, float], ...]
    """Those of the reward; failed judgements are counted where they are made, with answers that never get here."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_answer_tokens


@dataclass(frozen=True)
class StepBatch:
    """N samples of all ranks in one order, and of them this data-parallel rank's own as `local`.

    `dropped` are samples that were drawn but count nowhere: they are in no tensor and have no number.
    `mini_batches[m]` are micro-batches, each a list of positions in `local`; `own` are the global numbers of `local`.
    """

    facts: Sequence[SampleFacts]
    dropped: Sequence[SampleFacts]
    local: TrainBatch
    own: Sequence[int]
    mini_batches: Sequence[Sequence[Sequence[int]]]

    @property
    def micro_batches(self) -> list[Sequence[int]]:
        """All micro-batches of this rank, for scoring the whole batch."""
        return [micro for mini in self.mini_batches for micro in mini]

    @property
    def group_ids(self) -> Tensor:
        """[N] int64."""
        return torch.tensor([sample.prompt_id for sample in self.facts], dtype=torch.int64)

    @property
    def rewards(self) -> Tensor:
        """[N] float64."""
        return torch.tensor([sample.reward for sample in self.facts], dtype=torch.float64)

    @property
    def greedy_rewards(self) -> Tensor:
        """[N] float64: reward of the most likely answer to the sample's prompt, NaN where nobody asked for it."""
        return torch.tensor([sample.greedy_reward for sample in self.facts], dtype=torch.float64)

    @property
    def answer_lengths(self) -> Tensor:
        """[N] int64, tokens."""
        return torch.tensor([sample.num_answer_tokens for sample in self.facts], dtype=torch.int64)

    @property
    def own_numbers(self) -> Tensor:
        """[number of local samples] int64."""
        return torch.tensor(self.own, dtype=torch.int64)

    def with_local(self, local: TrainBatch) -> StepBatch:
        """The same samples with more tensors."""
        return dataclasses.replace(self, local=local)


def build_step_batch(
    world: World,
    groups: Sequence[SampleGroup],
    *,
    dp_ranks: Sequence[int],
    split: Callable[[Sequence[SampleFacts]], list[list[int]]],
    drop_cut_off: bool,
    max_tokens: int,
    micro_batch_multiple: int,
    device: torch.device,
) -> StepBatch:
    """Collective. `dp_ranks[r]` is the data-parallel rank of world rank r; `split` cuts samples into mini-batches."""
    mine = {(group.prompt.id, sample.index): (group, sample) for group in groups for sample in group.samples}
    drawn = sorted(fact for held in world.gather(_facts(groups)) for fact in held)
    facts = [fact for fact in drawn if not (drop_cut_off and fact.cut_off)]
    plan = plan_batches(
        [fact.num_tokens for fact in facts],
        split(facts),
        dp_size=max(dp_ranks) + 1,
        max_tokens=max_tokens,
        micro_batch_multiple=micro_batch_multiple,
    )
    owned = [[number for mini in plan for micro in mini[dp] for number in micro] for dp in range(max(dp_ranks) + 1)]
    keys = [(fact.prompt_id, fact.index) for fact in facts]
    outgoing = [
        [(number, _alone(*mine[keys[number]])) for number in numbers if keys[number] in mine] for numbers in owned
    ]
    received = world.exchange([outgoing[dp] for dp in dp_ranks])
    by_number = {number: alone for part in received for number, alone in part}
    own = owned[dp_ranks[world.rank]]
    local = assemble([by_number[number] for number in own])
    local = dataclasses.replace(local, sample_ids=torch.tensor(own, dtype=torch.int64)).to(device)
    place = {number: position for position, number in enumerate(own)}
    mini_batches = [[[place[n] for n in micro] for micro in mini[dp_ranks[world.rank]]] for mini in plan]
    dropped = [fact for fact in drawn if drop_cut_off and fact.cut_off]
    return StepBatch(facts, dropped, local, own, mini_batches)


def is_cut_off(sample: Sample) -> bool:
    """Whether an answer ended without an end-of-text token: what `algorithm.drop_cut_off` leaves out."""
    return sample.finish_reason != "stop"


def _facts(groups: Sequence[SampleGroup]) -> list[SampleFacts]:
    return [
        SampleFacts(
            prompt_id=group.prompt.id,
            index=sample.index,
            num_prompt_tokens=len(group.prompt.token_ids),
            num_answer_tokens=len(sample.token_ids),
            reward=math.nan if sample.reward is None else sample.reward,
            greedy_reward=math.nan if group.greedy_reward is None else group.greedy_reward,
            cut_off=is_cut_off(sample),
            parts=tuple((name, value) for name, value in sample.reward_parts.items() if name != RESERVED_PART),
        )
        for group in groups
        for sample in group.samples
    ]


def _alone(group: SampleGroup, sample: object) -> SampleGroup:
    """One sample with its prompt's tokens; texts and data rows stay where they are."""
    prompt = dataclasses.replace(group.prompt, text="", row={}, source="")
    return SampleGroup(prompt, (dataclasses.replace(sample, text="", reward_parts={}),))  # type: ignore[type-var, arg-type]
