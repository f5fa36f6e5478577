"""The unsharded model as Megatron describes it in a checkpoint, layer by layer, without memory for its weights.

In: an architecture. Out: groups of tensors (the embedding, one layer, the head), each with its rule and the names under
which Megatron keeps it. Must never read or write a file.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rlmegatron.config.schema import ModelConfig
from rlmegatron.learner.build import HiddenStatesModel, build_chunks
from rlmegatron.learner.groups import Topology
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Rule


@dataclass(frozen=True)
class Entry:
    """One tensor of the unsharded model; `described` is Megatron's description of it, around a tensor without data."""

    rule: Rule
    described: ShardedTensor | ShardedTensorFactory
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """What is converted together: all that is held in memory at one time."""

    name: str
    entries: tuple[Entry, ...]
    objects: tuple[ShardedObject, ...]

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(entry.num_bytes for entry in self.entries)

    def empty_tensors(self) -> dict[str, Tensor]:
        """Parameter name -> memory for it."""
        return {entry.rule.parameter: torch.empty(entry.shape, dtype=entry.dtype) for entry in self.entries}

    def shards(self, tensors: Mapping[str, Tensor] | None = None) -> Iterator[ShardedTensor]:
        """What a checkpoint holds of this group: views of `tensors`, or of nothing for a plan alone."""
        for entry in self.entries:
            data = entry.described.data if tensors is None else tensors[entry.rule.parameter]
            yield from _shards(entry.described, data)

    def packed_objects(self) -> dict[str, io.BytesIO]:
        """What else Megatron keeps of these modules (nothing, on a CPU), as it saves it."""
        return {item.unique_key: _packed(item) for item in self.objects}


def checkpoint_state(shards: Iterable[ShardedTensor]) -> dict[str, Tensor]:
    """What torch's distributed checkpointing takes: key -> its shards. Loading fills the tensors behind them."""
    by_key: dict[str, list[CheckpointableShardedTensor]] = {}
    for shard in shards:
        by_key.setdefault(shard.key, []).append(CheckpointableShardedTensor.from_sh_ten(shard))
    return {key: found[0] if len(found) == 1 else LocalShardsContainer(found) for key, found in by_key.items()}


def _shards(described: ShardedTensor | ShardedTensorFactory, data: Tensor) -> Iterator[ShardedTensor]:
    """A gated weight is two shards, as Megatron's factory cuts it; all others are one."""
    with_data = replace(described, data=data)
    built = with_data.build() if isinstance(with_data, ShardedTensorFactory) else [with_data]
    return (_along_layers(shard) for shard in built)


def _along_layers(shard: ShardedTensor) -> ShardedTensor:
    """The layers of a uniform model are stacked: their shards have a leading dimension that the tensor has not."""
    data = shard.data[(None,) * shard.prepend_axis_num]
    return replace(shard, data=data, local_shape=tuple(data.shape), prepend_axis_num=0)


def _packed(item: ShardedObject) -> io.BytesIO:
    """As Megatron saves an object: a list of the one that this process holds."""
    buffer = io.BytesIO()
    torch.save([item.data], buffer)
    buffer.seek(0)
    return buffer


def canonical_groups(arch: Architecture, topology: Topology, *, dtype: str) -> list[Group]:
    """The groups in the order of the layers, in `dtype` ("bf16" or "fp32"); `topology` must cut nothing."""
    assert topology.tp == topology.pp == topology.ep == topology.etp == 1, "the canonical model is not cut"
    with FakeTensorMode(allow_non_fake_inputs=True):
        (model,) = build_chunks(HiddenStatesModel, arch, ModelConfig(path="", dtype=dtype), topology)  # type: ignore[arg-type]
        state = model.sharded_state_dict()
    rules = {rule.parameter: rule for rule in arch.parameter_rules(1)}
    entries: dict[str, list[Entry]] = {}
    objects: dict[str, list[ShardedObject]] = {}
    for name, item in state.items():
        group = _group_of(name)
        if isinstance(item, ShardedObject):
            objects.setdefault(group, []).append(item)
            continue
        rule = rules[name]
        assert tuple(item.data.shape) == rule.local_shape(1), f"{name}: Megatron has {tuple(item.data.shape)}"
        entries.setdefault(group, []).append(Entry(rule, item, tuple(item.data.shape), item.data.dtype))
    found = {entry.rule.parameter for group in entries.values() for entry in group}
    missing = {rule.parameter for rule in rules.values() if not rule.copy} - found
    assert not missing, f"Megatron's checkpoints have no {sorted(missing)[:5]}"
    return [Group(name, tuple(parts), tuple(objects.get(name, ()))) for name, parts in entries.items()]


def _group_of(name: str) -> str:
    """The embedding, one layer, or what comes behind the layers."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        return f"layer {parts[2]}"
    return "embedding" if parts[0] == "embedding" else "head"
