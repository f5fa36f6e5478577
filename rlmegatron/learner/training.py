"""What turns a sharded model into one that learns: DDP buffers, Megatron's optimizer and its schedule.

In: a `ShardedModel` and the optimizer section. Out: one `step` per mini-batch. Gradients are sums over all
micro-batches and data-parallel ranks; whoever builds the loss has divided it by the global count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from rlmegatron.config.schema import OptimizerConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import DTYPES
from rlmegatron.learner.model import OnOutput, ShardedModel
from rlmegatron.metrics.values import Metric

# Megatron announces at every start that its fault-tolerant re-runs, which nobody here asks for, are off.
logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class StepReport:
    """`stats` of each micro-batch (last stage only), the gradient norm before clipping and the learning rate used.

    Not `applied` is a step that was vetoed: weights and schedule are as before it.
    """

    stats: list[Any]
    grad_norm: float = 0.0
    lr: float = 0.0
    applied: bool = True
    experts: Mapping[str, Metric] = field(default_factory=dict)
    """Load of the experts, from one rank of each pipeline stage for the stage's layers; see `ExpertRouting`."""


class Training:
    """Optimizer, schedule and gradient buffers of one model; the model is wrapped in place."""

    def __init__(
        self, model: ShardedModel, config: OptimizerConfig, *, num_steps: int, distributed_optimizer: bool
    ) -> None:
        self.model = model
        _wrap(model, distributed_optimizer=distributed_optimizer)
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(config, model.settings.dtype, distributed_optimizer=distributed_optimizer),
            model.wrapped,
            use_gloo_process_groups=False,
        )
        warmup = max(config.warmup_steps, 1)
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.lr if config.schedule == "constant" else config.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(num_steps, warmup) + 1,
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def settings(self) -> list[list[dict[str, Any]]]:
        """What the configuration says of every parameter group: rates, bounds, decay."""
        return [
            [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
            for groups in self.parameter_groups()
        ]

    def resume(self, settings: list[list[dict[str, Any]]], *, num_steps: int) -> None:
        """Go on after `num_steps` optimizer steps by today's `settings`, whatever a checkpoint has brought along."""
        for groups, wanted in zip(self.parameter_groups(), settings, strict=True):
            for group, values in zip(groups, wanted, strict=True):
                group.update(values)
        self.schedule.num_steps = num_steps

    def parameter_groups(self) -> list[list[dict[str, Any]]]:
        """The parameter groups of each optimizer of the chain."""
        return [optimizer.optimizer.param_groups for optimizer in self.optimizer.chained_optimizers]

    def state_tensors(self) -> Iterator[Tensor]:
        """Everything the optimizer holds on the device: fp32 main weights and moments."""
        for optimizer in self.optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    state = optimizer.optimizer.state.get(parameter, {})
                    yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())

    def step(
        self,
        micro_batches: Sequence[TrainBatch],
        on_output: OnOutput,
        *,
        veto: Callable[[list[Any]], bool] | None = None,
    ) -> StepReport:
        """One optimizer step over `micro_batches`; `on_output` returns (loss, statistics) on the last stage.

        veto: given the statistics (none on other stages), whether to leave the step out; alike on every rank. No step
        has a rate of 0: warm-up over w steps ends at step w, a decay one step after the last.
        """
        for chunk in self.model.wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        stats = self.model.run(micro_batches, on_output, backward=True)
        if veto is not None and veto(stats):
            return StepReport(stats, applied=False)
        self.schedule.step(1)
        succeeded, grad_norm, _ = self.optimizer.step()
        assert succeeded, "the optimizer skipped a step, which only fp16 loss scaling does"
        experts = {} if self.model.routing is None else self.model.routing.settle()
        return StepReport(stats, float(grad_norm), float(self.optimizer.param_groups[0]["lr"]), experts=experts)


def _wrap(model: ShardedModel, *, distributed_optimizer: bool) -> None:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    model.wrapped = [
        DistributedDataParallel(model.config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(model.chunks)
    ]
    model.config.finalize_model_grads_func = _finalize
    no_sync = [chunk.no_sync for chunk in model.wrapped]
    model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def _finalize(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over every axis; the division by tokens has been done in the loss."""
    finalize_model_grads(chunks, None, **kwargs)


def _optimizer_config(config: OptimizerConfig, dtype: str, *, distributed_optimizer: bool) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == "bf16",
        params_dtype=DTYPES[dtype],
        use_distributed_optimizer=distributed_optimizer,
    )


def no_grad(model: ShardedModel) -> None:
    """Freeze a model that only scores."""
    for chunk in model.chunks:
        chunk.requires_grad_(False)
        chunk.eval()
