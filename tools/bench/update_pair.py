"""Our actor update beside a bare Megatron loop on the same model, optimizer and micro-batches.

In: a run and a scored batch. Out: timings of both sides. Must never run while engines hold the device.

The bare loop is what a Megatron example has: zero the buffers, drive the schedule, step. Its inputs are packed before
the clock starts, and its loss is the plainest policy gradient, advantage times Megatron's own vocabulary-parallel cross
entropy: no ratio, clipping, entropy or statistics. It trains the chunks, DDP buffers and optimizer that ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench.measure import Timing
from bench.rollout_pair import timed
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor

from rlmegatron.learner.micro_batch import PackedInputs, pack_all
from rlmegatron.learner.model import select_all
from rlmegatron.trainer.batch import StepBatch
from rlmegatron.trainer.collect import generate, judge
from rlmegatron.trainer.credit import add_scores
from rlmegatron.trainer.online import step_batch
from rlmegatron.trainer.run import Run
from rlmegatron.trainer.update import update_actor
from rlmegatron.types import Prompt, SampleGroup


@dataclass(frozen=True)
class _MicroBatch:
    packed: PackedInputs
    weights: Tensor
    """[R]: advantage over the number of tokens, of each wanted token."""


def answers_to(run: Run, prompts: Sequence[Prompt]) -> list[SampleGroup]:
    """Judged groups, on a run whose engines serve."""
    sampling, samples = run.rollout.training_sampling(), run.cfg.rollout.samples_per_prompt
    groups = generate(run.world, run.rollout, prompts, sampling, num_samples=samples, purpose="bench/update")
    return judge(run.world, run.reward, groups)


def scored_batch(run: Run, groups: Sequence[SampleGroup]) -> StepBatch:
    """The batch of one step as the loop makes it, on a run whose learner holds the device."""
    batch, _ = add_scores(run.learner, step_batch(run, groups, step=1))
    return run.credit.assign(batch)[0]


class Updates:
    """Both sides: one pass over the batch, which is one optimizer step per mini-batch."""

    def __init__(self, run: Run, batch: StepBatch) -> None:
        self._run, self._batch = run, batch
        self._num_tokens = sum(fact.num_tokens for fact in batch.facts)
        count = max(1, sum(fact.num_answer_tokens for fact in batch.facts) // len(batch.mini_batches))
        self._prepared = [_prepare(run, batch, micro, count) for micro in batch.mini_batches if micro]

    def ours(self) -> Timing:
        """As the loop updates."""
        run = self._run

        def work() -> None:
            for _ in update_actor(run.learner, self._batch, run.objectives, epochs=1):
                pass
            _synchronize(run)

        return Timing(timed(run.world, work), self._num_tokens)

    def bare(self) -> Timing:
        """As Megatron alone does."""
        run = self._run

        def work() -> None:
            for micro_batches in self._prepared:
                _bare_step(run, micro_batches)
            _synchronize(run)

        return Timing(timed(run.world, work), self._num_tokens)


def _prepare(run: Run, batch: StepBatch, micro_batches: Sequence[Sequence[int]], count: int) -> list[_MicroBatch]:
    parts = [part.to(run.world.device) for part in select_all(batch.local, micro_batches)]
    packed = pack_all(parts, run.learner.topology, run.world.device)
    weights = [part.scores("advantages")[inputs.wanted] / count for part, inputs in zip(parts, packed, strict=True)]
    return [_MicroBatch(*one) for one in zip(packed, weights, strict=True)]


def _bare_step(run: Run, micro_batches: Sequence[_MicroBatch]) -> None:
    model, training = run.learner.actor.model, run.learner.actor.training
    assert training is not None, "the actor learns"
    for chunk in model.wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    model.topology.schedule()(
        forward_step_func=partial(_forward_step, run),
        data_iterator=[iter(micro_batches) for _ in model.chunks],
        model=model.wrapped,
        num_microbatches=len(micro_batches),
        seq_length=max(one.packed.tokens.shape[1] for one in micro_batches),
        micro_batch_size=1,
        forward_only=False,
    )
    training.optimizer.step()
    training.schedule.step(1)


def _forward_step(
    run: Run, batches: Iterator[_MicroBatch], chunk: Any, *_: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    one = next(batches)
    hidden = chunk(one.packed.tokens, one.packed.positions, None, packed_seq_params=one.packed.sequences)
    return hidden, partial(_loss, run, one, chunk.module)


def _loss(run: Run, one: _MicroBatch, chunk: Any, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    topology = run.learner.topology
    whole = gather_from_sequence_parallel_region if topology.sequence_parallel else copy_to_tensor_model_parallel_region
    rows = whole(hidden, group=topology.tp_group)[one.packed.predictors]
    logits = (rows @ chunk.output_weight.t()).float() / run.cfg.rollout.temperature
    nll = vocab_parallel_cross_entropy(logits, one.packed.labels[:, None])
    loss = (nll.flatten() * one.weights).sum()
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach()}


def _synchronize(run: Run) -> None:
    if run.world.device.type == "cuda":
        torch.cuda.synchronize()
