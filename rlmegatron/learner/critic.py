"""The critic: the value of the state in which each answer token was chosen, and its update.

In: a `TrainBatch` and an objective (a pure function of values). Out: values [T], equal on every TP and PP rank, or a
step report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm, Stat
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import HiddenStatesModel, ValueModel
from rlmegatron.learner.micro_batch import PackedInputs
from rlmegatron.learner.model import ShardedModel, score, select_all
from rlmegatron.learner.training import StepReport, Training

ValueObjective = Callable[[TrainBatch, Tensor], LossTerm]
"""(micro-batch on the device, values [T]) -> the summed loss."""


class Critic:
    """A sharded model with a value head; value i is read from the hidden state that predicts token i."""

    def __init__(self, model: ShardedModel, training: Training) -> None:
        self.model, self.training = model, training

    def values(self, batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        """[T] fp32 on the device, 0 where the token does not count."""

        def on_output(_: int, packed: PackedInputs, chunk: HiddenStatesModel, hidden: Tensor) -> Tensor:
            return packed.spread(self._values(packed, chunk, hidden))[None]

        return score(self.model, batch, micro_batches, on_output, num_values=1)[0]

    def update(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[Sequence[int]],
        objective: ValueObjective,
        *,
        denominator: float,
    ) -> StepReport:
        """One optimizer step on objective / denominator, where the denominator counts over all DP ranks."""
        parts = [part.to(self.model.device) for part in select_all(batch, micro_batches)]

        def on_output(
            index: int, packed: PackedInputs, chunk: HiddenStatesModel, hidden: Tensor
        ) -> tuple[Tensor, dict[str, Stat]]:
            term = objective(parts[index], packed.spread(self._values(packed, chunk, hidden)))
            return term.total / denominator, dict(term.stats)

        return self.training.step(parts, on_output)

    def _values(self, packed: PackedInputs, chunk: HiddenStatesModel, hidden: Tensor) -> Tensor:
        assert isinstance(chunk, ValueModel)
        return chunk.value(hidden, self.model.topology)[packed.predictors]
