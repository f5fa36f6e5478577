"""Whole Hugging Face tensors from a sharded model, bucket by bucket, gathered inside one data-parallel replica.

In: this rank's parameters with their rules, and the group of the replica's ranks. Out: an iterator over buckets of
(name, tensor), whole on the ranks that ask for them. Never holds more than one bucket beside the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.models.load import slices
from rlmegatron.models.rules import LAYER, Rule, Stage


@dataclass(frozen=True)
class TensorStream:
    """`places[i]` is the (tp rank, pp rank) of rank i of `group`; every rank of the group must iterate in step.

    `rules` are the whole model's; `parameters` maps a rule's parameter name to this rank's shard of it.
    """

    rules: Sequence[Rule]
    parameters: Mapping[str, Tensor]
    stage_of: Callable[[Rule], int]
    places: Sequence[tuple[int, int]]
    group: dist.ProcessGroup
    tp: int

    def names_and_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Every tensor of the checkpoint in the order in which it arrives; tied copies are left out."""
        return [(part.name, part.shape) for rule in self.rules if not rule.copy for part in rule.parts]

    def buckets(
        self, *, bytes_per_bucket: int, dtype: torch.dtype, receive: bool
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Buckets whose gather buffer stays below `bytes_per_bucket` (one larger parameter gets its own).

        Ranks with `receive` False take part in the gather and get empty lists.
        """
        for bucket in self._cut(bytes_per_bucket // dtype.itemsize):
            shards = self._gather(bucket, dtype)
            yield list(self._assemble(bucket, shards)) if receive else []

    def _cut(self, max_numel: int) -> Iterator[list[Rule]]:
        bucket: list[Rule] = []
        for rule in self.rules:
            if rule.copy:
                continue
            if bucket and self._buffer_numel([*bucket, rule]) > max_numel:
                yield bucket
                bucket = []
            bucket.append(rule)
        if bucket:
            yield bucket

    def _buffer_numel(self, bucket: Sequence[Rule]) -> int:
        return len(self.places) * max(self._numel(bucket, place) for place in self.places)

    def _numel(self, bucket: Sequence[Rule], place: tuple[int, int]) -> int:
        return sum(prod(rule.local_shape(self.tp)) for rule in self._sent_by(bucket, place))

    def _sent_by(self, bucket: Sequence[Rule], place: tuple[int, int]) -> Iterator[Rule]:
        """A replicated parameter is sent by its stage's first tensor-parallel rank alone."""
        tp_rank, pp_rank = place
        for rule in bucket:
            if self.stage_of(rule) == pp_rank and (rule.dim is not None or tp_rank == 0):
                yield rule

    def _gather(self, bucket: Sequence[Rule], dtype: torch.dtype) -> list[Tensor]:
        mine = [self.parameters[rule.parameter] for rule in self._sent_by(bucket, self.places[self.group.rank()])]
        device = next(iter(self.parameters.values())).device
        flat = torch.cat([torch.empty(0, dtype=dtype, device=device), *(p.detach().to(dtype).flatten() for p in mine)])
        if len(self.places) == 1:
            return [flat]
        padded = torch.zeros(self._buffer_numel(bucket) // len(self.places), dtype=dtype, device=device)
        padded[: len(flat)] = flat
        shards = [torch.empty_like(padded) for _ in self.places]
        dist.all_gather(shards, padded, group=self.group)
        return shards

    def _assemble(self, bucket: Sequence[Rule], shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        whole = {part.name: shards[0].new_empty(part.shape) for rule in bucket for part in rule.parts}
        for place, flat in zip(self.places, shards, strict=True):
            offset = 0
            for rule in self._sent_by(bucket, place):
                shape = rule.local_shape(self.tp)
                local = flat[offset : offset + prod(shape)].view(shape)
                offset += prod(shape)
                rank = place[0] if rule.dim is not None else 0
                for piece in rule.pieces(tp=self.tp if rule.dim is not None else 1, rank=rank):
                    whole[piece.name][slices(piece.source)] = local[slices(piece.target)]
        yield from whole.items()


def stage_lookup(cut: Mapping[tuple[int, int], Stage]) -> Callable[[Rule], int]:
    """Rule -> the pipeline rank that holds it."""
    by_layer = {layer: rank for (rank, _), stage in cut.items() for layer in stage.layers}
    last = max(rank for rank, _ in cut)

    def stage_of(rule: Rule) -> int:
        if rule.parameter.startswith(LAYER):
            return by_layer[int(rule.parameter.removeprefix(LAYER).split(".", 1)[0])]
        return 0 if rule.parameter.startswith("embedding.") else last

    return stage_of


def shard_files(
    names_and_shapes: Iterable[tuple[str, tuple[int, ...]]], *, itemsize: int, max_bytes: int
) -> list[list[str]]:
    """Names cut into files of at most `max_bytes` (one larger tensor gets its own), in the given order."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, shape in names_and_shapes:
        size = prod(shape) * itemsize
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files
