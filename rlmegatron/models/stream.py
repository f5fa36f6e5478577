"""Whole Hugging Face tensors from a sharded model, bucket by bucket, gathered inside one replica of it.

In: this rank's parameters with their rules, the replica's layout and its group. Out: an iterator over buckets of
(name, tensor), whole on the ranks that ask for them. Never holds more than one bucket beside the shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.models.load import slices
from rlmegatron.models.replica import Place, ReplicaLayout
from rlmegatron.models.rules import Rule
from rlmegatron.models.safetensors_writer import TensorSpec


@dataclass(frozen=True)
class TensorStream:
    """Every rank of `group` must iterate in step.

    `rules` are the whole model's; `parameters` maps a rule's parameter name to this rank's shard of it.
    """

    rules: Sequence[Rule]
    parameters: Mapping[str, Tensor]
    stage_of: Callable[[Rule], int]
    layout: ReplicaLayout
    group: dist.ProcessGroup
    num_experts: int = 0

    def tensors(self, dtype: torch.dtype) -> list[TensorSpec]:
        """Every tensor of the checkpoint, in the order of the rules; tied copies are left out."""
        return checkpoint_tensors(self.rules, dtype)

    def buckets(
        self, *, bytes_per_bucket: int, dtype: torch.dtype, receive: bool
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets whose gather buffer stays below `bytes_per_bucket` (one larger parameter gets its own), in any order.

        Ranks with `receive` False take part in the gather and get empty lists.
        """
        for fp32, rules in itertools.groupby(self._in_order_of_sending(), key=lambda rule: rule.keeps_fp32):
            sent_as = torch.float32 if fp32 else dtype
            for bucket in self._cut(rules, bytes_per_bucket // sent_as.itemsize):
                yield self._whole(bucket, sent_as, receive=receive)

    def _whole(self, bucket: Sequence[Rule], dtype: torch.dtype, *, receive: bool) -> list[tuple[str, Tensor]]:
        """The gathered shards are gone when it returns, before the next bucket is gathered."""
        shards = self._gather(bucket, dtype)
        return list(self._assemble(bucket, shards)) if receive else []

    def _in_order_of_sending(self) -> list[Rule]:
        """As they come, but neighbours in a bucket are experts of different ranks; what keeps fp32 is sent last."""
        num_local = max(1, self.num_experts // self.layout.ep)
        found: list[Rule] = []
        for _, run in itertools.groupby(self.rules, key=lambda rule: (rule.layer, rule.expert is None)):
            found += sorted(run, key=lambda rule: 0 if rule.expert is None else rule.expert % num_local)
        return sorted((rule for rule in found if not rule.copy), key=lambda rule: rule.keeps_fp32)

    def _cut(self, rules: Iterable[Rule], max_numel: int) -> Iterator[list[Rule]]:
        bucket: list[Rule] = []
        filled = [0] * len(self._places)
        for rule in rules:
            added = [n + self._numel_from(place, rule) for n, place in zip(filled, self._places, strict=True)]
            if bucket and len(added) * max(added) > max_numel:
                yield bucket
                bucket, added = [], [self._numel_from(place, rule) for place in self._places]
            bucket.append(rule)
            filled = added
        if bucket:
            yield bucket

    @cached_property
    def _places(self) -> list[Place]:
        return self.layout.places()

    def _numel_from(self, place: Place, rule: Rule) -> int:
        return prod(rule.local_shape(self.layout.cut(rule, place)[0])) if self.sends(place, rule) else 0

    def sends(self, place: Place, rule: Rule) -> bool:
        """A parameter that several ranks hold alike is sent by the first of them alone."""
        if self.stage_of(rule) != place.pp_rank:
            return False
        if rule.expert is None:
            return place.sends_dense and (rule.dim is not None or place.tp_rank == 0)
        num_local = self.num_experts // self.layout.ep
        is_mine = rule.expert // num_local == place.ep_rank
        return place.sends_experts and is_mine and (rule.dim is not None or place.etp_rank == 0)

    def _gather(self, bucket: Sequence[Rule], dtype: torch.dtype) -> list[Tensor]:
        place = self._places[self.group.rank()]
        mine = [self.parameters[rule.parameter].detach() for rule in bucket if self.sends(place, rule)]
        longest = max(sum(self._numel_from(place, rule) for rule in bucket) for place in self._places)
        device = next(iter(self.parameters.values())).device
        flat = torch.zeros(longest, dtype=dtype, device=device)
        offset = 0
        for tensor in mine:
            flat[offset : offset + tensor.numel()] = tensor.flatten()
            offset += tensor.numel()
        if len(self._places) == 1:
            return [flat]
        shards = [torch.empty_like(flat) for _ in self._places]
        dist.all_gather(shards, flat, group=self.group)
        return shards

    def _assemble(self, bucket: Sequence[Rule], shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        whole = {part.name: shards[0].new_empty(part.shape) for rule in bucket for part in rule.parts}
        for place, flat in zip(self._places, shards, strict=True):
            offset = 0
            for rule in bucket:
                if not self.sends(place, rule):
                    continue
                size, rank = self.layout.cut(rule, place)
                shape = rule.local_shape(size)
                local = flat[offset : offset + prod(shape)].view(shape)
                offset += prod(shape)
                for piece in rule.pieces(size=size, rank=rank):
                    whole[piece.name][slices(piece.source)] = local[slices(piece.target)]
        yield from whole.items()


def checkpoint_tensors(rules: Iterable[Rule], dtype: torch.dtype) -> list[TensorSpec]:
    """The tensors of a Hugging Face checkpoint in `dtype`, in the order of the rules."""
    return [
        TensorSpec(part.name, part.shape, torch.float32 if rule.keeps_fp32 else dtype)
        for rule in rules
        if not rule.copy
        for part in rule.parts
    ]
