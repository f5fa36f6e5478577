"""Megatron-Core's own `megatron.core.resharding`, to be measured: from the learner's shards into shards of engines.

In: a rank's training parameters. Out: the same weights cut by the engines' tensor parallelism, in Megatron's layout:
from there it is still a step to SGLang's, which is not measured. Its plan is made by its first call and cached, as it
does itself. Must never touch the learner's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bench.named_modules import hang_up
from bench.sync_layout import SyncLayout
from bench.synthetic_model import TrainShard, write_shard
from torch import Tensor, nn

from rlmegatron.models.rules import Rule
from rlmegatron.platform.megatron_cpu import prepare_megatron


class MegatronReshard:
    """Collective over all ranks."""

    def __init__(self, shard: TrainShard, *, rank: int) -> None:
        """Makes the target, an engine's share of the model, on every rank; its content is garbage."""
        prepare_megatron()
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

        layout = shard.layout
        engines = [tuple(sorted(ranks)) for ranks in layout.engines]  # as torch orders the ranks of a group
        self._cut = (layout.engine_tensor, next(ranks for ranks in engines if rank in ranks).index(rank))
        self._rules = [rule for rule in shard.rules if not rule.copy]
        self._target = {rule.parameter: self._empty(rule, shard) for rule in self._rules}
        held = {rule.parameter: shard.parameters[rule.parameter] for rule in shard.held if not rule.copy}
        self._source_model = _model(held, shard.rules, _groups(_by_stage(layout), rank))
        self._target_model = _model(self._target, shard.rules, _groups([engines], rank))
        self._service = GlooCopyService()

    def transfer(self) -> None:
        """As `megatron.core.resharding.swap_model_weights` with its gloo service."""
        from megatron.core.resharding import swap_model_weights

        swap_model_weights(self._source_model, self._target_model, self._service)

    @torch.no_grad()
    def spoil(self) -> None:
        """Fill the target with garbage."""
        for tensor in self._target.values():
            tensor.view(-1).view(torch.uint8).fill_(0xA5)

    def check(self, *, seed: int) -> None:
        """Raises ValueError for a target that is not, bit for bit, its share of the weights of `seed`."""
        size, rank = self._cut
        for rule in self._rules:
            found = self._target[rule.parameter]
            expected = torch.zeros_like(found)
            write_shard(rule, expected, size=size, rank=rank, seed=seed)
            if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                raise ValueError(f"{rule.parameter} is not what the learner has")

    def _empty(self, rule: Rule, shard: TrainShard) -> Tensor:
        return torch.empty(rule.local_shape(self._cut[0]), dtype=torch.float32 if rule.keeps_fp32 else shard.dtype)


def why_not(shard: TrainShard, *, same_dtype: bool) -> str | None:
    """What of a model or a layout it does not handle, or the benchmark does not set up for it."""
    if shard.arch.experts is not None:
        return "the benchmark sets it up for dense models alone"
    if not same_dtype:
        return "it copies bytes: learner and engine must have one type"
    return None


def _by_stage(layout: SyncLayout) -> list[list[tuple[int, ...]]]:
    """The learner's tensor-parallel groups of every pipeline stage."""
    tp, per_stage = layout.train.tp, layout.num_ranks // layout.train.pp
    firsts = range(0, layout.num_ranks, per_stage)
    return [[tuple(range(rank, rank + tp)) for rank in range(first, first + per_stage, tp)] for first in firsts]


def _groups(stages: Sequence[Sequence[tuple[int, ...]]], rank: int) -> Any:
    """Tensor-parallel groups as given, and data-parallel ones across those of a stage; every rank makes all."""
    made = {}
    for groups in stages:
        across = [tuple(ranks[place] for ranks in groups) for place in range(len(groups[0]))]
        for axis, every in (("tp", groups), ("dp", across)):
            for ranks in every:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    made[axis] = group
    return SimpleNamespace(**made, pp=None, ep=None, expt_tp=None)


def _model(parameters: dict[str, Tensor], rules: tuple[Rule, ...], groups: Any) -> nn.Module:
    """Parameters that carry the marks of Megatron's layers."""
    model: Any = nn.Module()
    hang_up(model, parameters)
    model.pg_collection, model.config = groups, SimpleNamespace(num_moe_experts=None)
    by_name = {rule.parameter: rule for rule in rules}
    for name, parameter in model.named_parameters():
        rule = by_name[name]
        if rule.dim is not None:
            is_gated = rule.blocks is None and len(rule.parts) > 1
            parameter.tensor_model_parallel, parameter.partition_dim = True, rule.dim
            parameter.partition_stride = len(rule.parts) if is_gated else 1
    return model  # type: ignore[no-any-return]
