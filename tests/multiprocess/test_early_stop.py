"""A step's policy updates end before the optimizer step whose mini-batch has drifted too far, on every rank alike.

What this does not prove: that stopping helps.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, critic, policy, start, streamed
from step_gradients import held_groups

from rlmegatron.algorithms.table import resolve
from rlmegatron.config.algorithm import AlgorithmConfig
from rlmegatron.data.mini_batches import by_group
from rlmegatron.distributed.world import start_world
from rlmegatron.learner.learner import Learner
from rlmegatron.metrics.log import StepLog
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.batch import build_step_batch
from rlmegatron.trainer.credit import add_scores
from rlmegatron.trainer.update import Objectives, update_actor

SHIFT = 0.5
"""By which the old policy's log-probabilities exceed the policy's on every token of the second mini-batch."""
KL = math.exp(-SHIFT) - 1 + SHIFT
"""k3 of exp(logp - old_logp) = exp(-SHIFT), the sampled side first: e^-d - 1 + d with d = SHIFT, by hand 0.1065."""


def updated(directory: str, layout: Layout, max_kl: float, all_masked: bool = False) -> dict[str, Any]:
    """Two mini-batches, of which only the second has drifted, or nothing counts in either."""
    topology, world = start(layout), start_world(timeout_s=60)
    learner = Learner(topology, world.device, policy(directory, topology), None, critic(directory, topology))
    batch = build_step_batch(
        world,
        held_groups(world, order=1),
        dp_ranks=world.gather(topology.dp_rank),
        split=lambda facts: by_group([sample.prompt_id for sample in facts], 2),
        drop_cut_off=False,
        max_tokens=40,
        micro_batch_multiple=1,
        device=world.device,
    )
    batch, _ = add_scores(learner, batch)
    local = batch.local
    late = (local.group_ids >= 2)[local.sequence_index]
    old = local.scores("old_logp") + SHIFT * late
    local = local.with_tensors(old_logp=old, advantages=torch.zeros_like(old))
    if all_masked:
        local = dataclasses.replace(local, loss_mask=torch.zeros_like(local.loss_mask))
    batch = batch.with_local(local)
    objectives = Objectives(AlgorithmConfig(), Adapted(0.0, None), 1.0, resolve("policy_loss", "ppo_clip"), None)
    before = streamed(learner.actor.model)
    log = StepLog(1)
    for metrics in update_actor(learner, batch, objectives, epochs=2, max_kl=max_kl):
        log.add(metrics)
    assert learner.actor.training is not None
    after = streamed(learner.actor.model)
    return {
        "steps": learner.actor.training.schedule.num_steps,
        "metrics": StepLog.merge(world.gather(log.payload())),
        "moved": max(float((after[name] - before[name]).abs().max()) for name in before),
    }


@pytest.mark.parametrize("layout", [Layout(2, {}), Layout(2, {"pipeline": 2})], ids=str)
def test_it_ends_before_the_mini_batch_that_is_too_far(models: Path, layout: Layout) -> None:
    for found in run_ranks(updated, layout.num_ranks, str(models / "Qwen3"), layout, 0.9 * KL):
        assert found["steps"] == 1  # of four: the first mini-batch's, and nothing after the second was seen
        assert found["metrics"]["kl_stop"] == 0.5
        assert found["metrics"]["approx_kl"] == pytest.approx(KL / 2, rel=0.5)  # over both mini-batches' tokens
        assert found["moved"] == 0.0  # advantages are 0


def test_below_the_bound_all_steps_are_taken(models: Path) -> None:
    for found in run_ranks(updated, 2, str(models / "Qwen3"), Layout(2, {}), 1.1 * KL):
        assert found["steps"] == 4
        assert found["metrics"]["kl_stop"] == 0.0


def test_a_batch_of_masked_samples_takes_no_step(models: Path) -> None:
    for found in run_ranks(updated, 2, str(models / "Qwen3"), Layout(2, {}), 1.0, True):
        assert (found["steps"], found["moved"], found["metrics"]) == (0, 0.0, {})
