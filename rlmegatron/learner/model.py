"""A sharded Megatron model of this rank with its weights from a Hugging Face directory, and the way through it.

In: micro-batches. Out: what a function of the last stage makes of each one's hidden states. Must never know what a
policy or a value is; `policy.py` and `critic.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor

from rlmegatron.config.schema import ModelConfig, MoeConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import HiddenStatesModel, build_chunks
from rlmegatron.learner.dist_weights import load_dist_checkpoint
from rlmegatron.learner.expert_routing import ExpertRouting
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.micro_batch import PackedInputs, pack_all
from rlmegatron.learner.router import Router
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import load_parameters
from rlmegatron.models.model_files import holds_megatron_checkpoint
from rlmegatron.models.replica import stage_lookup
from rlmegatron.models.rules import Rule, on_stage
from rlmegatron.models.source import SafetensorsDirectory
from rlmegatron.models.stream import TensorStream

OnOutput = Callable[[int, PackedInputs, HiddenStatesModel, Tensor], Any]
"""(micro-batch number, its inputs, the last chunk, hidden states [T 1 H]) -> what the schedule collects."""


class ShardedModel:
    """The pipeline chunks of one model on this rank, bare (`chunks`) and as the schedule runs them (`wrapped`)."""

    def __init__(
        self,
        kind: type[HiddenStatesModel],
        arch: Architecture,
        model: ModelConfig,
        topology: Topology,
        device: torch.device,
        *,
        moe: MoeConfig | None = None,
    ) -> None:
        """moe: for the policy; without it routers choose freely, and are neither balanced nor moved."""
        self.arch, self.settings, self.topology, self.device = arch, model, topology, device
        self.chunks = [chunk.to(device) for chunk in build_chunks(kind, arch, model, topology)]
        self.wrapped: list[HiddenStatesModel | DistributedDataParallel] = list(self.chunks)
        self.config = self.chunks[0].config
        self.routing = None
        if arch.experts:
            routers = [module for chunk in self.chunks for module in chunk.modules() if isinstance(module, Router)]
            self.routing = ExpertRouting(
                routers, num_experts=arch.experts.num, settings=moe or MoeConfig(), topology=topology
            )
        for tensor, rule in self.parameter_rules():
            _mark(tensor, rule)

    def parameter_rules(self) -> Iterator[tuple[Tensor, Rule]]:
        """This rank's parameters and buffers with the rule of each; a value head has one if its checkpoint has it."""
        for chunk, rules in zip(self.chunks, self._rules_by_name(), strict=True):
            for name, tensor in _tensors(chunk):
                if name in rules:
                    yield tensor, rules[name]

    def load(self, directory: str) -> None:
        """Fill every parameter that a checkpoint of either kind has; a value head only a reward model's has."""
        if holds_megatron_checkpoint(directory):
            load_dist_checkpoint(self.chunks, directory, vocab_size=self.arch.vocab_size)
            return
        source = SafetensorsDirectory(directory, fp8_block=self.arch.fp8_block)
        for chunk, rules in zip(self.chunks, self._rules_by_name(), strict=True):
            tensors = {name: tensor for name, tensor in _tensors(chunk) if name in rules or not _is_of_head(name)}
            unknown = tensors.keys() - rules.keys()
            assert not unknown, f"no rule for the parameters {sorted(unknown)}"
            load_parameters(source, tensors, rules, cut=self.topology.cut)

    def tensor_stream(self) -> TensorStream:
        """This model's weights as whole Hugging Face tensors, gathered inside one replica."""
        topology = self.topology
        return TensorStream(
            rules=self.arch.parameter_rules(topology.tp),
            parameters={rule.parameter: tensor for tensor, rule in self.parameter_rules()},
            stage_of=stage_lookup(topology.stages(self.arch.num_layers)),
            layout=topology.replica_layout,
            group=topology.replica_group,
            num_experts=self.arch.experts.num if self.arch.experts else 0,
        )

    def _rules_by_name(self) -> list[dict[str, Rule]]:
        rules = self.arch.parameter_rules(self.topology.tp)
        cut = self.topology.stages(self.arch.num_layers)
        experts = self.topology.local_experts(self.arch.experts.num) if self.arch.experts else None
        found = []
        for chunk in range(self.topology.vpp):
            by_name: dict[str, Rule] = {}
            for name, fused, rule in on_stage(rules, cut[self.topology.pp_rank, chunk], experts):
                by_name[name] = rule
                if fused is not None:
                    by_name[fused] = rule
            found.append(by_name)
        return found

    def run(self, micro_batches: Sequence[TrainBatch], on_output: OnOutput, *, backward: bool) -> list[Any]:
        """Drive the pipeline schedule; the list is filled on the last stage and empty elsewhere.

        Forward only, `on_output` returns anything; with `backward` it returns (loss to differentiate, statistics).
        """
        inputs = pack_all(micro_batches, self.topology, self.device)
        if self.routing is not None:
            self.routing.tell(micro_batches, [packed.sequences for packed in inputs], learns=backward)

        def finish(index: int, chunk: HiddenStatesModel, hidden: Tensor, non_loss_data: bool = False) -> Any:
            output = on_output(index, inputs[index], chunk, hidden)
            if non_loss_data:
                return output
            loss, stats = output
            return loss, torch.zeros((), dtype=torch.int, device=self.device), stats

        def step(iterator: Iterator[int], chunk: Any, *_: Any) -> tuple[Tensor, Callable[..., Any]]:
            index = next(iterator)
            packed = inputs[index]
            hidden = chunk(packed.tokens, packed.positions, None, packed_seq_params=packed.sequences)
            return hidden, partial(finish, index, chunk.module if chunk not in self.chunks else chunk)

        with torch.set_grad_enabled(backward):
            return self.topology.schedule()(
                forward_step_func=step,
                data_iterator=[iter(range(len(inputs))) for _ in self.chunks],
                model=self.wrapped,
                num_microbatches=len(inputs),
                seq_length=max(packed.tokens.shape[1] for packed in inputs),
                micro_batch_size=1,
                forward_only=not backward,
                collect_non_loss_data=not backward,
            )

    def to_every_stage(self, values: Tensor) -> Tensor:
        """Send a tensor of known shape from the last stage to all stages of this pipeline, in place."""
        if self.topology.pp > 1:
            dist.broadcast(values, src=self.topology.last_stage_rank, group=self.topology.pp_group)
        return values


def _tensors(chunk: HiddenStatesModel) -> Iterator[tuple[str, Tensor]]:
    """Everything of a chunk that a checkpoint holds: its parameters, and the buffers that are part of its state."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _is_of_head(name: str) -> bool:
    return name.startswith("value_head.")


def _mark(parameter: Tensor, rule: Rule) -> None:
    """Megatron marks cut parameters while it initialises them, which we skip; the gradient norm depends on the mark.

    Transformer Engine marks what it duplicates as cut; the norm would then count it on every rank. Megatron takes
    experts for dense parameters at EP 1, and would not sum their gradients over the tensor-parallel ranks that
    hold them alike at ETP 1: as experts they are summed over all that hold them.
    """
    if rule.dim is None:
        parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
    elif not getattr(parameter, "tensor_model_parallel", False):
        set_tensor_model_parallel_attributes(parameter, True, rule.dim, 1)
    if rule.expert is not None:
        parameter.allreduce = False  # type: ignore[attr-defined]


def score(
    model: ShardedModel,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    on_output: OnOutput,
    *,
    num_values: int,
) -> Tensor:
    """[num_values, T] per-token values of a whole batch, aligned with its tokens, equal on every TP and PP rank.

    `on_output` returns [num_values, T of the micro-batch]; `micro_batches` are sample numbers, each in one micro-batch.
    """
    parts = model.run(select_all(batch, micro_batches), on_output, backward=False)
    values = torch.zeros(num_values, len(batch.tokens), device=model.device)
    bounds = batch.cu_seqlens.tolist()
    for part, members in zip(parts, micro_batches, strict=bool(parts)):
        if members:
            rows = torch.cat([torch.arange(bounds[i], bounds[i + 1], device=model.device) for i in members])
            values[:, rows] = part
    return model.to_every_stage(values)


def select_all(batch: TrainBatch, micro_batches: Sequence[Sequence[int]]) -> list[TrainBatch]:
    """The micro-batches; an empty one becomes a dummy that counts for nothing: every rank runs the same number."""
    return [batch.select(members) if members else batch.dummy(2) for members in micro_batches]
