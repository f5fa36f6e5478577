"""A small job on this rank: its shard of a learner and, where it leads one, a stand-in engine with SGLang's parameters.

In: a family and a layout. Out: publishes, and what engines then hold beside what they should. What they should hold
comes from `loading_engine.py`, which knows nothing of the layouts and plans of the reshard. Runs in a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.stand_in_engine import StandInEngine
from bench.sync_layout import parse_layout
from bench.synthetic_model import TrainShard, content
from bench.worker_server import WorkerServer
from torch import Tensor

from rlmegatron.distributed.world import RankFailure, World
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.rules import Part
from rlmegatron.rollout.placement import engine_of, place_engines
from rlmegatron.weight_sync.engine_loader import loadable
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.hf_stream import HfStream
from rlmegatron.weight_sync.publish import publish
from rlmegatron.weight_sync.reshard import Name, Reshard, ReshardSettings
from rlmegatron.weight_sync.transport import Transport
from rlmegatron.weight_sync.verify import Verifier

sys.path.append(str(Path(__file__).parents[1] / "unit" / "weight_sync"))

import worker_loaders
from loading_engine import LoadingEngine
from random_checkpoint import architecture

BUCKET = 1 << 16
TIMEOUT_S = 600.0  # longer than any test may take: whoever waits for it has failed
_FOUR_EXPERTS: dict[str, dict[str, int]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 4},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "DeepseekV2ForCausalLM": {"n_routed_experts": 4},
    "DeepseekV3ForCausalLM": {"n_routed_experts": 4},
}


@dataclass(frozen=True)
class Setup:
    """A model in a layout such as 'tp4->tp2'. `on_cpu` is for what SGLang's engines would run, which decides what they
    pad; `changes` are keys of config.json."""

    family: str
    layout: str
    on_cpu: bool = True
    train_dtype: torch.dtype = torch.float32
    engine_dtype: torch.dtype = torch.bfloat16
    ranks_per_node: int = 64
    changes: dict[str, Any] = field(default_factory=dict)

    def architecture(self) -> Architecture:
        return architecture(self.family, **_FOUR_EXPERTS.get(self.family, {}), **self.changes)


@cache
def worker_server() -> WorkerServer:
    """Of this process, with which it ends; engines of all ranks take their workers from it."""
    return WorkerServer()


class Job:
    """Collective to build, to publish with and to ask what differs; `engine` is None on ranks that lead none."""

    def __init__(self, setup: Setup, world: World, workers: str, *, engine_arch: Architecture | None = None) -> None:
        """workers: address of the server. engine_arch: a model that engines have instead of the learner's."""
        self.setup, self.arch = setup, setup.architecture()
        device = torch.device("cpu" if setup.on_cpu else "cuda")  # of which only the type is looked at
        self.world = replace(world, device=device, ranks_per_node=setup.ranks_per_node)
        self.layout = parse_layout(setup.layout, num_ranks=world.size)
        self.shard = TrainShard(self.arch, self.layout, rank=world.rank, dtype=setup.train_dtype)
        for buffer in self.shard.buffers:
            buffer.fill_(float("nan"))  # also what the learner pads with, which must never reach an engine
        groups = {ranks: dist.new_group(list(ranks)) for ranks in self.layout.replicas}
        self.stream = self.shard.stream(next(group for ranks, group in groups.items() if world.rank in ranks))
        placed = place_engines(
            world_size=world.size,
            tensor=self.layout.engine_tensor,
            ranks_per_node=setup.ranks_per_node,
            train_tensor=self.layout.train.tp,
        )
        self.engines = Engines(placed, self.layout.engine_tensor, self.layout.engine_expert, setup.engine_dtype)
        self.version = 0
        self.engine: StandInEngine | None = None
        self.start_engine(workers, engine_arch or self.arch)

    def start_engine(self, workers: str, arch: Architecture) -> None:
        """In place of the one that is there."""
        self.close()
        if engine_of(self.world.rank, self.engines.placements).lead == self.world.rank:
            types: dict[str, Any] = {"dtype": self.setup.engine_dtype, "on_cpu": self.setup.on_cpu}
            self.engine = StandInEngine(arch, server=workers, **types, **self._engine_sizes)
            self._shape_as_sglang(arch)

    def restart_engine(self) -> None:
        """The same with other workers; its weights are garbage then."""
        if self.engine is not None:
            self.engine.restart()
            self._shape_as_sglang(self.arch)
            self.engine.spoil()

    @property
    def _engine_sizes(self) -> dict[str, Any]:
        return {"tensor": self.layout.engine_tensor, "expert": self.layout.engine_expert}

    def _shape_as_sglang(self, arch: Architecture) -> None:
        """Padding included, of which the stand-in alone has only some."""
        keeps_fp32, orders = _keeps_fp32(arch), []
        for parameters in self._loaded(arch, {name: torch.zeros(shape) for name, shape in _shapes(arch)}):
            dtypes = {name: "float32" if name in keeps_fp32 else _name(self.setup.engine_dtype) for name in parameters}
            orders.append({name: [list(tensor.shape), dtypes[name]] for name, tensor in parameters.items()})
        self.in_workers(worker_loaders.set_parameters, orders)

    def in_workers(self, loader: Any, orders: Sequence[Any]) -> None:
        """Have one of `worker_loaders` act on each rank of this rank's engine, which must be published to then."""
        if self.engine is not None:
            self.engine.begin_weight_update()
            self.in_workers_of_open_update(loader, orders)
            self.engine.distrust_weights()

    def in_workers_of_open_update(self, loader: Any, orders: Sequence[Any]) -> None:
        """The same in the middle of a publish."""
        if self.engine is not None:
            tensors = [worker_loaders.as_tensor(order) for order in orders]
            self.engine.update_weights([("order", tensors)], load_format=f"{loader.__module__}.{loader.__name__}")

    def train(self, seed: int) -> None:
        """New weights, in place."""
        self.shard.fill(seed=seed)

    def spoil(self) -> None:
        """Garbage for all that this rank's engine holds."""
        if self.engine is not None:
            self.engine.spoil()

    def hf_stream(self) -> HfStream:
        return HfStream(self.stream, self.arch, dtype=self.setup.engine_dtype, bytes_per_bucket=BUCKET)

    def reshard(self, name: Name, *, bytes_per_bucket: int = BUCKET, plans: Path | None = None) -> Reshard:
        settings = ReshardSettings(bytes_per_bucket=bytes_per_bucket, timeout_s=TIMEOUT_S, cache=plans)
        return Reshard(name, self.stream, self.arch, self.engines, self.world, settings)

    def publish(self, transport: Transport, *, verifies: bool = False) -> None:
        """The next version."""
        self.version += 1
        verifier = self._verifier() if verifies else None
        if self.engine is not None:
            self.engine.caller = transport.name
        publish(self.world, transport, self.engine, version=self.version, verifier=verifier)

    def _verifier(self) -> Verifier:
        return Verifier(self.world, self.stream, self.arch, self.engines)

    def refusal(self, transport: Transport, *, verifies: bool = False) -> str:
        """The one line with which a publish fails."""
        try:
            self.publish(transport, verifies=verifies)
        except RankFailure as failure:
            return str(failure).splitlines()[0]
        return ""

    def held(self) -> dict[str, Tensor]:
        """'rank name' -> all that this engine's workers hold, what is derived included."""
        found = {}
        for rank in range(self.engine.tensor if self.engine else 0):
            assert self.engine is not None
            found |= {f"{rank} {name}": tensor for name, tensor in self.engine.parameters(rank)}
            derived = {one.homes[0].parameter for one in self.engine.specs[rank].placements() if one.is_derived}
            found |= {f"{rank} {name}": self.engine.read(rank, name) for name in derived}
        return found

    def expected(self, seed: int) -> dict[str, Tensor]:
        """The same, from whole tensors and SGLang's rules as plain loops."""
        if self.engine is None:
            return {}
        whole = {name: torch.empty(shape) for name, shape in _shapes(self.arch)}
        for name, tensor in whole.items():
            content(Part(name, tensor.shape), tuple((0, size) for size in tensor.shape), seed=seed, out=tensor)
        found, keeps_fp32 = {}, _keeps_fp32(self.arch)
        for rank, tensors in enumerate(self._loaded(self.arch, whole, with_derived=True)):
            for name, tensor in tensors.items():
                rounded = tensor.to(self.setup.train_dtype).to(self.setup.engine_dtype)
                found[f"{rank} {name}"] = tensor if name in keeps_fp32 else rounded
        return found

    def _loaded(
        self, arch: Architecture, whole: dict[str, Tensor], *, with_derived: bool = False
    ) -> list[dict[str, Tensor]]:
        """Rank -> parameter -> its part of `whole`, padded."""
        engine = LoadingEngine(arch, on_cpu=self.setup.on_cpu, **self._engine_sizes)
        for bucket in loadable([list(whole.items())], arch):
            engine.update_weights(bucket)
        return [
            {**engine.parameters(rank), **(_as_attributes(engine.derived(rank)) if with_derived else {})}
            for rank in range(engine.tensor)
        ]

    def bytes_to_receive(self) -> int:
        """What this rank's part of its engine holds and its own shard does not, element by element.

        What lies in two parameters is received for each.
        """
        first, numbered = 1, {}  # 0 is padding
        for name, shape in _shapes(self.arch):
            numbered[name] = torch.arange(first, first + prod(shape), dtype=torch.float64).view(shape)
            first += prod(shape)
        own = torch.cat([torch.zeros(1, dtype=torch.float64), *self._own(numbered)])
        engine_rank = engine_of(self.world.rank, self.engines.placements).ranks.index(self.world.rank)
        total, keeps_fp32 = 0, _keeps_fp32(self.arch)
        for name, wanted in self._loaded(self.arch, numbered)[engine_rank].items():
            missing = ~torch.isin(wanted.unique(), own)
            total += int(missing.sum()) * (4 if name in keeps_fp32 else self.setup.engine_dtype.itemsize)
        return total

    def _own(self, numbered: dict[str, Tensor]) -> Iterator[Tensor]:
        """A tied head counts as the embedding's copy, from which nothing is sent."""
        for rule in self.shard.held:
            if not rule.copy:
                size, rank = self.shard.cut(rule)
                for piece in rule.pieces(size=size, rank=rank):
                    yield numbered[piece.name][slices(piece.source)].flatten()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of which one side has no tensor, another one, or another bit in it."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if name not in found or name not in expected or _differ(found, expected, name))


def _differ(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> bool:
    one, other = found[name], expected[name]
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    return not torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def _shapes(arch: Architecture) -> list[tuple[str, tuple[int, ...]]]:
    rules = [rule for rule in arch.parameter_rules(1) if not rule.copy]
    return [(part.name, part.shape) for rule in rules for part in rule.parts]


def _keeps_fp32(arch: Architecture) -> set[str]:
    return {part.name for rule in arch.parameter_rules(1) if rule.keeps_fp32 for part in rule.parts}


def _as_attributes(derived: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the paths that placements give."""
    return {
        f"{name}.mT" if name.endswith("w_vc") else name: tensor.mT if name.endswith("w_vc") else tensor
        for name, tensor in derived.items()
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
