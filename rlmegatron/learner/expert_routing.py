"""The routers of one model on this rank: what they are told about micro-batches, and what follows from their notes.

In: micro-batches. Out: a `Routing` for each; after an optimizer step the load of the experts, as metrics and as a step
of the routing biases. Must never know of losses other than the balance of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.algorithms.expert_balance import bias_step, max_violation, variation
from rlmegatron.config.schema import MoeConfig
from rlmegatron.data.batch import FREE, NO_ID, TrainBatch
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.router import Router
from rlmegatron.learner.routing import RoutedSequences, Routing
from rlmegatron.metrics.values import Max, Mean, Metric

# T tokens of a micro-batch, L layers with experts of this rank, E experts, K experts of a token


class ExpertRouting:
    """`settings` are the run's for the policy, and the defaults for critic and reference.

    Those are other models than the engine's: their routers choose freely, and are neither balanced nor moved.
    """

    def __init__(self, routers: Sequence[Router], *, num_experts: int, settings: MoeConfig, topology: Topology) -> None:
        self.routers, self.num_experts, self.settings, self.topology = routers, num_experts, settings, topology
        self._told: list[Routing] = []
        self._num_sequences = 1.0

    def tell(self, batches: Sequence[TrainBatch], sequences: Sequence[RoutedSequences], *, learns: bool) -> None:
        """Put a `Routing` of each micro-batch into its sequence parameters; with `learns` collective."""
        balance_weight = 0.0
        if learns and self.settings.aux_loss_coef:
            self._num_sequences = self._count_sequences(batches)
            balance_weight = self.settings.aux_loss_coef / self._num_sequences
        told = []
        for batch, packed in zip(batches, sequences, strict=True):
            packed.routing = self._routing(batch, packed, learns=learns, balance_weight=balance_weight)
            told.append(packed.routing)
        self._told = told if learns else []

    def settle(self) -> dict[str, Metric]:
        """After an optimizer step: move the biases by the load of its mini-batch, and give its metrics.

        Collective over the ranks of a stage; the first of them gives the metrics of the stage's layers, others none.
        """
        told, self._told = self._told, []
        if not self.routers:
            return {}
        table = torch.stack([sum(routing.notes[router.layer] for routing in told) for router in self.routers])  # type: ignore[misc]
        if self.topology.sequence_parallel:
            dist.all_reduce(table, group=self.topology.tp_group)
        dist.all_reduce(table, group=self.topology.dp_group)
        load, others = table.split([self.num_experts, table.shape[1] - self.num_experts], dim=1)
        if self.settings.bias_update_rate:
            self._move_biases(load)
        if self.topology.tp_rank or self.topology.dp_rank or not load.any():
            return {}
        return self._metrics(load.cpu(), others.cpu())

    def _count_sequences(self, batches: Sequence[TrainBatch]) -> float:
        """Of the mini-batch on all data-parallel ranks; 1 if there are none, for then nothing is divided."""
        count = torch.stack([(batch.sample_ids != NO_ID).sum() for batch in batches]).sum().double()
        dist.all_reduce(count, group=self.topology.dp_group)
        return float(count) or 1.0

    def _routing(self, batch: TrainBatch, packed: RoutedSequences, *, learns: bool, balance_weight: float) -> Routing:
        bounds, topology = packed.cu_seqlens_q, self.topology
        is_real = torch.zeros(len(bounds) - 1, dtype=torch.bool, device=bounds.device)  # filler comes last, if any
        is_real[: batch.num_sequences] = batch.sample_ids.to(bounds.device) != NO_ID
        lengths = bounds.diff().long()
        numbers = torch.arange(len(lengths), device=bounds.device).where(is_real, len(lengths))
        sequence = numbers.repeat_interleave(lengths)
        mine, group = slice(None), None
        if topology.sequence_parallel:
            size = len(sequence) // topology.tp
            mine, group = slice(topology.tp_rank * size, (topology.tp_rank + 1) * size), topology.tp_group
        wanted = None
        if self.settings.router_replay:
            experts = self._wanted(batch, len(sequence))[mine].to(bounds.device)
            wanted = {router.layer: experts[:, place] for place, router in enumerate(self.routers)}
        return Routing(sequence[mine], lengths, wanted, learns, balance_weight, group)

    def _wanted(self, batch: TrainBatch, num_tokens: int) -> Tensor:
        """[T L K] of a micro-batch that is filled up to `num_tokens`."""
        told = batch.routed_experts
        if told is None:  # a rank that got no samples knows of no experts, and has dummies only
            real = "moe.router_replay is on, but the batch does not say which experts the engine chose"
            assert (batch.sample_ids == NO_ID).all(), real
            top_k = self.routers[0].experts.top_k if self.routers else 0
            return torch.full((num_tokens, len(self.routers), top_k), FREE, dtype=torch.int16)
        assert not told.numel() or int(told.max()) < self.num_experts, f"the engine names expert {int(told.max())}"
        wanted = torch.full(
            (num_tokens, len(self.routers), told.shape[-1]), FREE, dtype=torch.int16, device=told.device
        )
        wanted[: len(told)] = told[:, [router.layer for router in self.routers]]
        return wanted

    def _move_biases(self, load: Tensor) -> None:
        for router, step in zip(self.routers, bias_step(load, self.settings.bias_update_rate), strict=True):
            assert router.expert_bias is not None, "moe.bias_update_rate is for models that have a routing bias"
            router.expert_bias += step.to(router.expert_bias.dtype)

    def _metrics(self, load: Tensor, others: Tensor) -> dict[str, Metric]:
        violation = max_violation(load)
        metrics: dict[str, Metric] = {
            "moe/load_max_violation": Mean.of(violation),
            "moe/load_max_violation_max": Max.of(violation),
            "moe/load_cv": Mean.of(variation(load)),
        }
        balance, differing, replayed = others.sum(0).tolist()
        if self.settings.aux_loss_coef:
            metrics["moe/aux_loss"] = Mean(balance / self._num_sequences, len(self.routers))
        if self.settings.router_replay:
            metrics["moe/replay_disagreement"] = Mean(differing, replayed)
        return metrics
