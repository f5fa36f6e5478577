"""Learning: the configured losses as objectives of one micro-batch, and the optimizer steps over a rollout batch.

In: a batch with advantages. Out: new weights and the statistics of the step. The division by the global count happens
here, once per optimizer step, so the gradient knows nothing of ranks, micro-batches or packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.algorithms.aggregation import denominator_part, token_weights
from rlmegatron.algorithms.loss_term import LossTerm, Stat
from rlmegatron.algorithms.regularizers import entropy_bonus, kl_penalty
from rlmegatron.algorithms.table import Piece
from rlmegatron.config.schema import AlgorithmConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.learner import Learner
from rlmegatron.learner.training import StepReport
from rlmegatron.metrics.values import Last, Mean, Metric, from_parts
from rlmegatron.trainer.batch import StepBatch


@dataclass(frozen=True)
class Objectives:
    """The losses of a run."""

    config: AlgorithmConfig
    policy_loss: Piece
    value_loss: Piece | None

    def policy(self, batch: TrainBatch, logp: Tensor, entropy: Tensor) -> LossTerm:
        """Policy loss, entropy bonus and, where configured, the divergence; summed over the micro-batch."""
        config = self.config
        weights = token_weights(batch.loss_mask, batch.cu_seqlens, config.aggregation)
        term = self.policy_loss(
            logp=logp,
            old_logp=batch.scores("old_logp"),
            advantages=batch.scores("advantages"),
            weights=weights,
            mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        term += entropy_bonus(entropy=entropy, weights=weights, coef=config.entropy_coef)
        if batch.ref_logp is not None:
            coef = config.kl.coef if config.kl.where == "loss" else 0.0
            term += kl_penalty(
                logp=logp, ref_logp=batch.ref_logp, weights=weights, estimator=config.kl.estimator, coef=coef
            )
        return self._with_loss(term, batch)

    def value(self, batch: TrainBatch, values: Tensor) -> LossTerm:
        """Value loss, summed over the micro-batch."""
        assert self.value_loss is not None
        term = self.value_loss(
            values=values,
            old_values=batch.scores("values"),
            returns=batch.scores("returns"),
            weights=token_weights(batch.loss_mask, batch.cu_seqlens, self.config.aggregation),
            value_clip=self.config.value_clip,
        )
        return self._with_loss(term, batch)

    def count(self, batch: TrainBatch) -> float:
        """What this batch adds to the denominator."""
        return denominator_part(batch.loss_mask, batch.cu_seqlens, self.config.aggregation)

    def _with_loss(self, term: LossTerm, batch: TrainBatch) -> LossTerm:
        count = term.total.new_tensor(self.count(batch), dtype=torch.float64)
        loss = Stat("mean", torch.stack([term.total.detach().double(), count]))
        return LossTerm(term.total, {**term.stats, "loss": loss})


def update_actor(
    learner: Learner, batch: StepBatch, objectives: Objectives, *, epochs: int
) -> Iterator[dict[str, Metric]]:
    """One optimizer step per mini-batch and epoch; yields each step's metrics where this rank reports them."""
    yield from _update(learner.topology, batch, objectives, learner.actor.update, objectives.policy, epochs)


def update_critic(
    learner: Learner, batch: StepBatch, objectives: Objectives, *, epochs: int
) -> Iterator[dict[str, Metric]]:
    """The same for the critic."""
    assert learner.critic is not None
    yield from _update(learner.topology, batch, objectives, learner.critic.update, objectives.value, epochs)


def _update(
    topology: Topology,
    batch: StepBatch,
    objectives: Objectives,
    step: Callable[..., StepReport],
    objective: Callable[..., LossTerm],
    epochs: int,
) -> Iterator[dict[str, Metric]]:
    for _ in range(epochs):
        for micro_batches in batch.mini_batches:
            if not micro_batches:  # more mini-batches than samples
                continue
            denominator = _global_count(topology, batch.local, micro_batches, objectives)
            report = step(batch.local, micro_batches, objective, denominator=denominator)
            yield _metrics(report, reports=topology.is_last_stage and topology.tp_rank == 0)


def _global_count(
    topology: Topology, local: TrainBatch, micro_batches: Sequence[Sequence[int]], objectives: Objectives
) -> float:
    """Over all data-parallel ranks; 1 when nothing counts, so that the loss is 0 and not NaN."""
    members = [number for micro in micro_batches for number in micro]
    count = torch.tensor(objectives.count(local.select(members)), dtype=torch.float64, device=local.tokens.device)
    dist.all_reduce(count, group=topology.dp_group)
    return float(count) or 1.0


def _metrics(report: StepReport, *, reports: bool) -> dict[str, Metric]:
    """Statistics are noted by one rank of each data-parallel replica, or sums would count every TP and PP rank."""
    if not reports:
        return {}
    merged: dict[str, Stat] = {}
    for stats in report.stats:
        for name, stat in stats.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    metrics: dict[str, Metric] = {
        name: from_parts(stat.reduction, stat.parts.tolist()) for name, stat in merged.items()
    }
    return {**metrics, "grad_norm": Mean.of([report.grad_norm]), "lr": Last(report.lr)}
