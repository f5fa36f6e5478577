"""One step's gradients as the trainer makes them: judged groups of all ranks to gradients by Hugging Face name.

In: a layout, how the work is cut and an algorithm. Out: gradients of policy or critic before any optimizer step. Runs
in a rank; answers, rewards and what stands in for other models' scores depend on tokens alone.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from sharded import Layout, critic, policy, start
from torch import Tensor

from rlmegatron.algorithms.table import resolve
from rlmegatron.config.algorithm import AlgorithmConfig
from rlmegatron.config.schema import RewardConfig
from rlmegatron.data.mini_batches import by_group
from rlmegatron.distributed.world import World, start_world
from rlmegatron.learner.learner import Learner
from rlmegatron.learner.model import ShardedModel
from rlmegatron.learner.training import Training
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.batch import StepBatch, build_step_batch
from rlmegatron.trainer.credit import Credit, add_scores
from rlmegatron.trainer.update import Objectives, update_actor, update_critic
from rlmegatron.types import Prompt, Sample, SampleGroup

NUM_GROUPS, SAMPLES = 4, 4
VOCAB = 37


@dataclass(frozen=True)
class Case:
    """A layout, the size of micro-batches (1: every sample alone), and a seed of who holds what in which order."""

    layout: Layout
    max_tokens: int
    order: int

    def __str__(self) -> str:
        return f"{self.layout}-{self.max_tokens}tokens-order{self.order}"


@dataclass(frozen=True)
class Algorithm:
    """Settings of an algorithm; `critic` asks for the gradients of the value loss."""

    settings: dict[str, Any] = field(default_factory=dict)
    critic: bool = False


def judged_samples() -> list[tuple[Prompt, Sample, float]]:
    """(prompt, sample, reward of the greedy answer): two equal prompts, an empty answer, equal rewards in one group."""
    rng = random.Random(5)
    found = []
    for number in range(NUM_GROUPS):
        text = 1 if number in (1, 2) else number  # prompts 1 and 2 read the same
        prompt = Prompt(number, tuple((7 * text + 3 * i) % VOCAB for i in range(3 + text)), "", {}, "")
        for index in range(SAMPLES):
            length = 0 if (number, index) == (0, 2) else rng.randint(1, 9)
            tokens = tuple(rng.randrange(VOCAB) for _ in range(length))
            logprobs = tuple(-3.0 + rng.uniform(-0.2, 0.2) for _ in tokens)
            reward = 0.5 if number == 3 else float(rng.random() < 0.5) + 0.25 * index
            finish = "length" if length >= 7 else "stop"
            found.append((prompt, Sample(number, index, tokens, logprobs, (0,) * length, finish, "", reward), 0.4))
    return found


def held_groups(world: World, order: int) -> list[SampleGroup]:
    """This rank's part: samples dealt one by one, so that members of a group lie on different ranks."""
    samples = judged_samples()
    random.Random(order).shuffle(samples)
    return [SampleGroup(prompt, (sample,), greedy) for prompt, sample, greedy in samples[world.rank :: world.size]]


def gradients(directory: str, case: Case, algorithms: dict[str, Algorithm]) -> dict[str, dict[str, Tensor]]:
    """Algorithm -> gradients."""
    topology, world = start(case.layout), start_world(timeout_s=60)
    dp_ranks = world.gather(topology.dp_rank)
    # Gradients of a distributed optimizer are whole on no rank.
    actor = policy(directory, topology, distributed_optimizer=False)
    values = critic(directory, topology, distributed_optimizer=False)
    for part in (actor, values):
        _calm(part.model)
    learner = Learner(topology, world.device, actor, None, values)
    batch = build_step_batch(
        world,
        held_groups(world, case.order),
        dp_ranks=dp_ranks,
        split=lambda facts: by_group([sample.prompt_id for sample in facts], 1),
        drop_cut_off=False,
        max_tokens=case.max_tokens,
        micro_batch_multiple=topology.pp if topology.vpp > 1 else 1,
        device=world.device,
    )
    scored = _with_stand_ins(add_scores(learner, batch)[0])
    return {name: _gradients(learner, world, scored, algorithm) for name, algorithm in algorithms.items()}


def _calm(model: ShardedModel) -> None:
    """Weights as large as trained ones: the models' are five times that, which amplifies rounding."""
    with torch.no_grad():
        for tensor, _ in model.parameter_rules():
            if tensor.dim() > 1:
                tensor.mul_(0.2)


def _with_stand_ins(batch: StepBatch) -> StepBatch:
    """An old policy and a reference that differ from the policy, token by token, and the engine's log-probabilities
    near those of the old policy."""
    local = batch.local
    wave = torch.sin(local.positions + 2.0 * local.tokens + 0.7 * local.group_ids[local.sequence_index])
    old = local.scores("old_logp") + 0.3 * wave
    local = local.with_tensors(old_logp=old, ref_logp=old + 0.2 * torch.cos(3 * wave))
    rollout_logp = torch.where(local.loss_mask, old + 0.4 * torch.cos(5 * wave), 0.0)
    return batch.with_local(dataclasses.replace(local, rollout_logp=rollout_logp))


def _gradients(learner: Learner, world: World, batch: StepBatch, algorithm: Algorithm) -> dict[str, Tensor]:
    config = AlgorithmConfig(**algorithm.settings)
    adapted = Adapted(config.kl.coef, None)
    advantage = resolve("advantage", config.advantage)
    if not config.traits.uses_values:
        batch = batch.with_local(dataclasses.replace(batch.local, values=None))
    credit = Credit(advantage, config, RewardConfig(), adapted, learner.topology.dp_group, world.gather)
    batch, _ = credit.assign(batch)
    policy_loss, value_loss = resolve("policy_loss", config.policy_loss), resolve("value_loss", config.value_loss)
    objectives = Objectives(config, adapted, 10.0, policy_loss, value_loss)
    if algorithm.critic:
        assert learner.critic is not None
        return _captured(learner.critic.model, learner.critic.training, update_critic, learner, batch, objectives)
    assert learner.actor.training is not None
    return _captured(learner.actor.model, learner.actor.training, update_actor, learner, batch, objectives)


def _captured(
    model: ShardedModel, training: Training, update: Any, learner: Learner, batch: StepBatch, objectives: Objectives
) -> dict[str, Tensor]:
    """Run an update whose optimizer notes the reduced gradients instead of taking a step."""
    found: dict[str, Tensor] = {}

    def note() -> tuple[bool, float, None]:
        found.update(_whole_gradients(model))
        return True, 0.0, None

    training.optimizer.step = note
    for _ in update(learner, batch, objectives, epochs=1):
        pass
    return found


def _whole_gradients(model: ShardedModel) -> dict[str, Tensor]:
    """Of the body and the output layer, by Hugging Face name."""
    grads = {rule.parameter: tensor.main_grad for tensor, rule in model.parameter_rules()}  # type: ignore[attr-defined]
    stream = dataclasses.replace(model.tensor_stream(), parameters=grads)
    buckets = stream.buckets(bytes_per_bucket=1 << 20, dtype=torch.float32, receive=True)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the expected ones."""
    assert found.keys() == expected.keys()
    off = math.sqrt(sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected))
    return off / math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
