"""The policy: log-probabilities and entropy of answer tokens, and their update.

In: a `TrainBatch` and an objective (a pure function of log-probabilities). Out: per-token scores, equal on every TP and
PP rank, or a step report. The reference model is a policy that is never updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm, Stat
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import HiddenStatesModel
from rlmegatron.learner.micro_batch import PackedInputs
from rlmegatron.learner.model import ShardedModel, score, select_all
from rlmegatron.learner.training import StepReport, Training
from rlmegatron.learner.vocab_parallel import token_logprobs

PolicyObjective = Callable[[TrainBatch, Tensor, Tensor], LossTerm]
"""(micro-batch on the device, logp [T], entropy [T]) -> the summed loss."""


class Policy:
    """A sharded language model as a distribution over answer tokens at the sampling temperature."""

    def __init__(self, model: ShardedModel, *, temperature: float, training: Training | None = None) -> None:
        self.model, self.temperature, self.training = model, temperature, training

    def logprobs(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(logp, entropy), each [T] fp32 in nats on the device, 0 where the token does not count."""

        def on_output(_: int, packed: PackedInputs, chunk: HiddenStatesModel, hidden: Tensor) -> Tensor:
            logp, entropy = self._scores(packed, chunk, hidden)
            return torch.stack([packed.spread(logp), packed.spread(entropy)])

        logp, entropy = score(self.model, batch, micro_batches, on_output, num_values=2)
        return logp, entropy

    def update(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        objective: PolicyObjective,
        *,
        denominator: float,
        veto: Callable[[list[Any]], bool] | None = None,
    ) -> StepReport:
        """One optimizer step on objective / denominator, where the denominator counts over all DP ranks.

        veto: see `Training.step`.
        """
        assert self.training is not None, "a reference model is never updated"
        parts = [part.to(self.model.device) for part in select_all(batch, micro_batches)]

        def on_output(
            index: int, packed: PackedInputs, chunk: HiddenStatesModel, hidden: Tensor
        ) -> tuple[Tensor, dict[str, Stat]]:
            logp, entropy = self._scores(packed, chunk, hidden)
            term = objective(parts[index], packed.spread(logp), packed.spread(entropy))
            return term.total / denominator, dict(term.stats)

        return self.training.step(parts, on_output, veto=veto)

    def _scores(self, packed: PackedInputs, chunk: HiddenStatesModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
        topology, settings = self.model.topology, self.model.settings
        if topology.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=topology.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=topology.tp_group)
        return token_logprobs(
            hidden[packed.predictors, 0],
            chunk.output_weight,
            packed.labels,
            group=topology.tp_group,
            vocab_size=self.model.arch.vocab_size,
            temperature=self.temperature,
            chunk=settings.logprob_chunk,
        )
