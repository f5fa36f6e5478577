"""Acting and judging: prompts to judged answers, each engine's lead rank working on its share.

In: the prompts of a step, the same on every rank. Out: judged groups on the lead ranks. Must never touch the learner.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlmegatron.config.schema import EvalConfig, RolloutConfig
from rlmegatron.distributed.world import World
from rlmegatron.rewards.judge import Judge
from rlmegatron.rollout.api import EngineDied, GenerationRequest, SamplingConfig
from rlmegatron.rollout.placement import EnginePlacement
from rlmegatron.rollout.sglang_engine import SGLangEngine
from rlmegatron.types import Prompt, Sample, SampleGroup


@dataclass
class Rollout:
    """This rank's part in generation: `engine` where it leads one, and which share of the prompts that engine gets."""

    config: RolloutConfig
    engines: Sequence[EnginePlacement]
    engine: SGLangEngine | None
    engine_index: int
    seed: int
    replay: bool = False
    """Whether answers to learn from tell which experts their tokens went to."""
    restarted: bool = False

    def share(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts of this rank's engine: every len(engines)-th; none where this rank leads no engine."""
        return prompts[self.engine_index :: len(self.engines)] if self.engine is not None else ()

    def on_engine(self, world: World, phase: str, action: Callable[[SGLangEngine], None]) -> None:
        """Do something with every engine, on its lead rank; an error on one is an error on all."""

        def act() -> None:
            if self.engine is not None:
                action(self.engine)

        world.settle(phase, act)

    def training_sampling(self) -> SamplingConfig:
        """How answers to learn from are drawn."""
        config = self.config
        return SamplingConfig(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=config.stop_token_ids,
            routed_experts=self.replay,
        )

    def greedy_sampling(self) -> SamplingConfig:
        """The most likely answer."""
        return SamplingConfig(0.0, self.config.max_new_tokens, stop_token_ids=self.config.stop_token_ids)

    def eval_sampling(self, config: EvalConfig, *, greedy: bool) -> SamplingConfig:
        """How answers to held-out prompts are drawn; what `config` leaves open is as in training."""
        sampling = self.greedy_sampling()
        if not greedy:
            training = self.training_sampling()
            temperature, top_p = config.temperature or training.temperature, config.top_p or training.top_p
            sampling = dataclasses.replace(training, temperature=temperature, top_p=top_p)
        return dataclasses.replace(sampling, max_new_tokens=config.max_new_tokens or sampling.max_new_tokens)


class EnginesDied(Exception):
    """Raised alike on every rank: the engines of `ranks` have ended; `report` names their logs."""

    def __init__(self, ranks: list[int], report: str) -> None:
        super().__init__(report)
        self.ranks, self.report = ranks, report


def generate(
    world: World,
    rollout: Rollout,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    *,
    num_samples: int,
    purpose: str,
) -> list[SampleGroup]:
    """`num_samples` answers to each prompt of this rank's share; raises EnginesDied or RankFailure on every rank.

    The sample is decided by (run seed, purpose, prompt id, sample index), never by the rank or the batch.
    """

    def ask() -> tuple[list[SampleGroup], str | None]:
        share = rollout.share(prompts)
        if not share:
            return [], None
        assert rollout.engine is not None
        requests = [
            GenerationRequest(prompt.id, index, prompt.token_ids, sample_seed(rollout.seed, purpose, prompt.id, index))
            for prompt in share
            for index in range(num_samples)
        ]
        try:
            samples = rollout.engine.generate(requests, sampling)
        except EngineDied as error:
            return [], str(error)
        return group(share, samples, num_samples=num_samples), None

    groups, death = world.settle("rollout", ask)
    deaths = world.gather(death)
    dead = [rank for rank, message in enumerate(deaths) if message is not None]
    if dead:
        raise EnginesDied(dead, f"rollout failed on rank {dead[0]}: {deaths[dead[0]]}")
    return groups


def group(prompts: Sequence[Prompt], samples: Sequence[Sample], *, num_samples: int) -> list[SampleGroup]:
    """Samples in request order, cut into the groups of their prompts."""
    return [
        SampleGroup(prompt, tuple(samples[start : start + num_samples]))
        for prompt, start in zip(prompts, range(0, len(samples), num_samples), strict=True)
    ]


def judge(world: World, reward: Judge, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """Fill in the rewards on every rank that has groups; one report on every rank when a reward fails."""
    return world.settle("reward", lambda: reward.judge(groups))


def sample_seed(seed: int, purpose: str, prompt_id: int, index: int) -> int:
    """A 63-bit seed of one sample, the same on every machine."""
    text = f"{seed}/{purpose}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
