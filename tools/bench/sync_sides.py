"""The sides of the benchmark: ways to move the learner's weights into engines, each behind the same few methods.

In: a rank's training shard and its engine, if it leads one. Out: `Side`s that are built, run, spoiled and checked
alike. A new transport is one line in `SIDES`. Must never time anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from bench.megatron_reshard import MegatronReshard, why_not
from bench.stand_in_engine import StandInEngine
from bench.sync_scene import Scene
from bench.synthetic_model import content
from torch import Tensor

from rlmegatron.models.load import slices
from rlmegatron.models.rules import Part
from rlmegatron.rollout.placement import place_engines
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.hf_stream import HfStream
from rlmegatron.weight_sync.reshard import Reshard, ReshardSettings
from rlmegatron.weight_sync.transport import Transport

REFERENCE = "hf_stream"


class Side(Protocol):
    """Collective over all ranks, but for `spoil`."""

    def build(self) -> None:
        """What the first call needs besides `transfer`; its time counts as that call's."""

    def transfer(self) -> None:
        """Move all weights."""

    def counted(self) -> tuple[int, int] | None:
        """(bytes received, messages) of the last transfer, where it does not all go through torch.distributed."""

    def spoil(self) -> None:
        """Fill what this rank receives for with garbage."""

    def check(self, *, seed: int) -> None:
        """Raises ValueError for a destination that differs from the learner's weights of `seed` in a single bit."""


class EngineSide:
    """A `Transport` of ours into the stand-in engines."""

    def __init__(self, name: str, scene: Scene, make: Callable[[Scene], Transport]) -> None:
        self._name, self._scene, self._make = name, scene, make
        self._transport: Transport | None = None

    def build(self) -> None:
        """See `Side`."""
        self._transport = self._make(self._scene)

    def transfer(self) -> None:
        """See `Side`."""
        assert self._transport is not None, "it is built first"
        if self._scene.engine is not None:
            self._scene.engine.caller = self._name
        self._transport.transfer(self._scene.engine)

    def counted(self) -> tuple[int, int] | None:
        """See `Side`."""
        if isinstance(self._transport, Reshard):
            return self._transport.bytes_received, self._transport.num_messages
        return None

    def spoil(self) -> None:
        """See `Side`."""
        if self._scene.engine is not None:
            self._scene.engine.spoil()

    def check(self, *, seed: int) -> None:
        """See `Side`."""
        scene = self._scene
        if scene.engine is None:
            return
        parts = {part.name: part for rule in scene.shard.rules for part in rule.parts}
        for rank in range(scene.engine.tensor):
            _check_rank(scene.engine, rank, parts, train_dtype=scene.shard.dtype, seed=seed)


class MegatronSide:
    """Megatron-Core's own, into shards of its own layout on the training ranks."""

    def __init__(self, scene: Scene) -> None:
        """Its target counts as an engine's model does: it is there before the clock starts."""
        self._reshard = MegatronReshard(scene.shard, rank=scene.world.rank)

    def build(self) -> None:
        """See `Side`; it plans in its first transfer."""

    def transfer(self) -> None:
        """See `Side`."""
        self._reshard.transfer()

    def counted(self) -> tuple[int, int] | None:
        """See `Side`."""
        return None

    def spoil(self) -> None:
        """See `Side`."""
        self._reshard.spoil()

    def check(self, *, seed: int) -> None:
        """See `Side`."""
        self._reshard.check(seed=seed)


def _hf_stream(scene: Scene) -> Transport:
    return HfStream(
        scene.shard.stream(scene.group),
        scene.shard.arch,
        dtype=scene.engine_dtype,
        bytes_per_bucket=scene.bytes_per_bucket,
    )


def _reshard(name: Any) -> Callable[[Scene], Transport]:
    def make(scene: Scene) -> Transport:
        layout, world = scene.shard.layout, scene.world
        placed = place_engines(
            world_size=world.size,
            tensor=layout.engine_tensor,
            ranks_per_node=world.ranks_per_node,
            train_tensor=layout.train.tp,
        )
        engines = Engines(placed, layout.engine_tensor, layout.engine_expert, scene.engine_dtype)
        settings = ReshardSettings(bytes_per_bucket=scene.bytes_per_bucket, timeout_s=scene.timeout_s)
        return Reshard(name, scene.shard.stream(scene.group), scene.shard.arch, engines, world, settings)

    return make


SIDES: Mapping[str, Callable[[Scene], Side]] = {
    "peer": lambda scene: EngineSide("peer", scene, _reshard("peer")),
    "collective": lambda scene: EngineSide("collective", scene, _reshard("collective")),
    REFERENCE: lambda scene: EngineSide(REFERENCE, scene, _hf_stream),
    "megatron": MegatronSide,
}
"""What --transports may name, in the order of the table."""


def why_left_out(name: str, scene: Scene) -> str | None:
    """Why a side cannot run this model in this layout, if so."""
    if name == "megatron":
        return why_not(scene.shard, same_dtype=scene.engine_dtype == scene.shard.dtype)
    return None


def _check_rank(
    engine: StandInEngine, rank: int, parts: Mapping[str, Part], *, train_dtype: torch.dtype, seed: int
) -> None:
    """Every placement of one rank, what is derived included."""
    spec, held = engine.specs[rank], {}
    keeps_fp32 = spec.fp32_tensors()
    for placement in spec.placements():
        home = placement.homes[0]
        if home.parameter not in held:
            held = {home.parameter: engine.read(rank, home.parameter)}  # one at a time
        shape = [stop - start for start, stop in placement.source]
        expected = torch.empty(shape, dtype=torch.float32)
        content(parts[placement.name], placement.source, seed=seed, out=expected)
        if placement.name not in keeps_fp32:
            expected = expected.to(train_dtype).to(spec.dtype)
        found = held[home.parameter][slices(home.box)].reshape(shape)
        if not torch.equal(_bits(found), _bits(expected)):
            raise ValueError(f"{placement.name} is not in {home.parameter} of engine rank {rank} as the learner has it")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
