"""Learning: the configured losses as objectives of one micro-batch, and the optimizer steps over a rollout batch.

In: a batch with advantages. Out: new weights and the statistics of the step. The division by the global count happens
here, once per optimizer step, so the gradient knows nothing of ranks, micro-batches or packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.algorithms.aggregation import denominator_part, token_weights
from rlmegatron.algorithms.drift import drift_stats
from rlmegatron.algorithms.loss_term import LossTerm, Stat
from rlmegatron.algorithms.promised import promised_loss
from rlmegatron.algorithms.regularizers import entropy_bonus, kl_penalty
from rlmegatron.algorithms.table import Piece
from rlmegatron.config.algorithm import AlgorithmConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.learner import Learner
from rlmegatron.learner.training import StepReport
from rlmegatron.metrics.values import Last, Mean, Metric
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.batch import StepBatch
from rlmegatron.trainer.step_metrics import stat_metrics


@dataclass(frozen=True)
class Objectives:
    """The losses of a run; `constant` is what 'seq_mean_token_sum_norm' divides by, tokens."""

    config: AlgorithmConfig
    adapted: Adapted
    constant: float
    policy_loss: Piece
    value_loss: Piece | None

    def policy(self, batch: TrainBatch, logp: Tensor, entropy: Tensor) -> LossTerm:
        """Policy loss, entropy bonus and, where configured, the divergence; summed over the micro-batch."""
        config = self.config
        weights, old_logp = self._weights(batch), batch.scores("old_logp")
        returned = self.policy_loss(
            logp=logp,
            old_logp=old_logp,
            advantages=batch.scores("advantages"),
            weights=weights if batch.importance is None else weights * batch.importance,
            mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        term = promised_loss(self.policy_loss, returned)
        term += LossTerm(
            torch.zeros_like(term.total), drift_stats(logp=logp, old_logp=old_logp, counted=batch.loss_mask)
        )
        term += entropy_bonus(entropy=entropy, weights=weights, coef=config.entropy_coef)
        if batch.ref_logp is not None:
            term += kl_penalty(
                logp=logp,
                ref_logp=batch.ref_logp,
                old_logp=old_logp,
                weights=weights,
                estimator=config.kl.estimator,
                coef=self.adapted.kl_coef if config.kl.where == "loss" else 0.0,
            )
        return self._with_loss(term, batch)

    def value(self, batch: TrainBatch, values: Tensor) -> LossTerm:
        """Value loss, summed over the micro-batch."""
        assert self.value_loss is not None
        returned = self.value_loss(
            values=values,
            old_values=batch.scores("values"),
            returns=batch.scores("returns"),
            weights=self._weights(batch),
            value_clip=self.config.value_clip,
        )
        return self._with_loss(promised_loss(self.value_loss, returned), batch)

    def count(self, batch: TrainBatch) -> float:
        """What this batch adds to the denominator."""
        return denominator_part(batch.loss_mask, batch.cu_seqlens, self.config.aggregation)

    def _weights(self, batch: TrainBatch) -> Tensor:
        return token_weights(batch.loss_mask, batch.cu_seqlens, self.config.aggregation, constant=self.constant)

    def _with_loss(self, term: LossTerm, batch: TrainBatch) -> LossTerm:
        count = term.total.new_tensor(self.count(batch), dtype=torch.float64)
        loss = Stat("mean", torch.stack([term.total.detach().double(), count]))
        return LossTerm(term.total, {**term.stats, "loss": loss})


def update_actor(
    learner: Learner, batch: StepBatch, objectives: Objectives, *, epochs: int, max_kl: float | None = None
) -> Iterator[dict[str, Metric]]:
    """One optimizer step per mini-batch and epoch; yields each step's metrics where this rank reports them.

    With `max_kl` it ends before the optimizer step whose mini-batch has a larger mean divergence from the old policy.
    """
    topology = learner.topology

    veto = None if max_kl is None else lambda stats: drift(learner, stats) > max_kl
    for micro_batches, denominator in _optimizer_steps(topology, batch, objectives, epochs):
        report = learner.actor.update(batch.local, micro_batches, objectives.policy, denominator=denominator, veto=veto)
        stopped = {} if max_kl is None else {"kl_stop": Mean.of([float(not report.applied)])}
        yield _metrics(report, stopped, reports=topology.is_last_stage and topology.tp_rank == 0)
        if not report.applied:
            return


def update_critic(
    learner: Learner, batch: StepBatch, objectives: Objectives, *, epochs: int
) -> Iterator[dict[str, Metric]]:
    """The same for the critic, which nothing ends early."""
    assert learner.critic is not None
    topology = learner.topology
    for micro_batches, denominator in _optimizer_steps(topology, batch, objectives, epochs):
        report = learner.critic.update(batch.local, micro_batches, objectives.value, denominator=denominator)
        yield _metrics(report, {}, reports=topology.is_last_stage and topology.tp_rank == 0)


def drift(learner: Learner, stats: Sequence[Mapping[str, Stat]]) -> float:
    """Collective; mean k3 divergence of the policy from the old one over a mini-batch, alike on every rank."""
    topology = learner.topology
    totals = torch.zeros(2, dtype=torch.float64, device=learner.device)
    for part in stats:  # of the last stage alone
        totals += part["approx_kl"].parts
    if topology.is_last_stage:
        dist.all_reduce(totals, group=topology.dp_group)
    total, count = learner.actor.model.to_every_stage(totals).tolist()
    return total / count if count else 0.0


def _optimizer_steps(
    topology: Topology, batch: StepBatch, objectives: Objectives, epochs: int
) -> Iterator[tuple[Sequence[Sequence[int]], float]]:
    """Micro-batches and denominator of each optimizer step of a rollout batch.

    A mini-batch in which nothing counts takes no step: momentum would move the weights without a gradient.
    """
    for _ in range(epochs):
        for micro_batches in batch.mini_batches:
            if micro_batches:  # else there are more mini-batches than samples
                denominator = _global_count(topology, batch.local, micro_batches, objectives)
                if denominator:
                    yield micro_batches, denominator


def _global_count(
    topology: Topology, local: TrainBatch, micro_batches: Sequence[Sequence[int]], objectives: Objectives
) -> float:
    """Over all data-parallel ranks."""
    members = [number for micro in micro_batches for number in micro]
    count = torch.tensor(objectives.count(local.select(members)), dtype=torch.float64, device=local.tokens.device)
    dist.all_reduce(count, group=topology.dp_group)
    return float(count)


def _metrics(report: StepReport, more: Mapping[str, Metric], *, reports: bool) -> dict[str, Metric]:
    """Statistics are noted by one rank of each data-parallel replica, or sums would count every TP and PP rank."""
    if not reports:
        return dict(report.experts)
    merged: dict[str, Stat] = {}
    for stats in report.stats:
        for name, stat in stats.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    metrics = stat_metrics(merged)
    if report.applied:
        metrics |= {"grad_norm": Mean.of([report.grad_norm]), "lr": Last(report.lr)}
    return {**metrics, **more, **report.experts}
