"""The reshard into SGLang's own model classes: ranks are threads, engines' workers too, and all else is as in a run.

In: two paths; the first holds a list of `Case`s. Out: at the second, an `Outcome` of each: where engines differ, in any
bit, from SGLang's model that its own loader has filled. Runs as `sglang_models.py` does.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from bench.sync_layout import parse_layout
from bench.synthetic_model import TrainShard
from random_checkpoint import NAMES, checkpoint, config
from ranks_in_threads import run_ranks_in_threads
from sglang_models import EngineRank, build, leave_out_other_models
from torch import Tensor

from rlmegatron.distributed.world import World
from rlmegatron.models.load import slices
from rlmegatron.models.stream import TensorStream
from rlmegatron.models.table import architecture_of
from rlmegatron.rollout.api import RolloutEngine
from rlmegatron.rollout.placement import place_engines
from rlmegatron.weight_sync.engine_loader import loadable
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.reshard import Name, Reshard, ReshardSettings

LATENT = NAMES[6:]
TRANSPORTS: tuple[Name, ...] = ("peer", "collective")
TIMEOUT_S = 120.0
Content = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A family in a layout such as 'tp4->tp2' over `num_ranks` (as few as can be, unless given), `per_node` of them on
    a node.

    on_cpu: the way of SGLang's loaders. dtypes: of the learner and of engines. changes: keys of config.json beside
    `sizes`. See `EngineRank` for `fuses`.
    """

    family: str
    layout: str
    on_cpu: bool = True
    dtypes: tuple[str, str] = ("float32", "bfloat16")
    changes: dict[str, Any] = field(default_factory=dict)
    num_ranks: int | None = None
    per_node: int = 64
    fuses: bool = False

    def __str__(self) -> str:
        ranks = f" on {self.num_ranks}" if self.num_ranks else ""
        nodes = f", {self.per_node} a node" if self.per_node < 64 else ""
        how = f"{'cpu' if self.on_cpu else 'gpu'}-{'->'.join(self.dtypes)}{'-fuses' * self.fuses}"
        changes = "".join(f"-{key}={value}" for key, value in self.changes.items())
        return f"{self.family}-{self.layout}{ranks}{nodes}-{how}{changes}"

    @property
    def config(self) -> dict[str, Any]:
        """The whole config.json."""
        return {**config(self.family), **sizes(self.family), **self.changes}


def sizes(name: str) -> dict[str, Any]:
    """Heads and experts that 8 ranks divide, and a vocabulary that nothing divides."""
    dense = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 71}
    latent = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "vocab_size": 71}
    experts = {"Qwen3MoeForCausalLM": {"num_experts": 8}, "MixtralForCausalLM": {"num_local_experts": 8}}
    return latent if name in LATENT else {**dense, **experts.get(name, {})}


@dataclass(frozen=True)
class Outcome:
    """`names` of all tensors that were compared; `unlike` has a line for each that differs; the most `messages` of a
    rank, by transport."""

    names: list[str]
    unlike: list[str]
    messages: dict[Name, int]


class Scene:
    """One case: a learner's shards and engines of SGLang's models."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case, self.arch = case, architecture_of(case.config)
        self.layout = parse_layout(case.layout, num_ranks=case.num_ranks)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(case.config))
        self._directory = directory

    def build(self, rank: int) -> Any:
        """One rank of SGLang's model, all NaN."""
        case, tensor, expert = self.case, self.layout.engine_tensor, self.layout.engine_expert
        place = (tensor, rank, case.on_cpu, case.dtypes[1])
        return build(EngineRank(case.family, str(self._directory), *place, fuses=case.fuses, ep=expert))

    def loaded(self, *, seed: int) -> list[Content]:
        """What each rank of an engine holds when SGLang has loaded the checkpoint, as 'hf_stream' sends it."""
        weights = checkpoint(self.arch, seed=seed, dtype=getattr(torch, self.case.dtypes[1]))
        calls = list(loadable([list(weights.items())], self.arch))
        found = []
        for rank in range(self.layout.engine_tensor):
            model = self.build(rank)
            for call in calls:
                model.load_weights(iter(call))
            found.append(content_of(model))
        return found

    def resharded(self, name: Name, *, seeds: Sequence[int]) -> tuple[list[list[Content]], int]:
        """By engine and rank, after a publish of each of `seeds` by one transport; and the messages of the last."""
        tensor = self.layout.engine_tensor
        engines = [ModelsOfEngine([self.build(rank) for rank in range(tensor)]) for _ in self.layout.engines]
        steps = [checkpoint(self.arch, seed=seed, dtype=getattr(torch, self.case.dtypes[0])) for seed in seeds]

        def publish(world: World) -> int:
            number, engine_rank = self.layout.engine_rank(world.rank)
            engine = cast(RolloutEngine, engines[number]) if engine_rank == 0 else None
            shard, transport = self._side(name, world)
            for weights in steps:
                fill(shard, weights)
                transport.transfer(engine)
            return transport.num_messages

        messages = run_ranks_in_threads(
            publish,
            num_ranks=self.layout.num_ranks,
            ranks_per_node=self.case.per_node,
            device=torch.device("cpu" if self.case.on_cpu else "cuda"),  # of which only the type is looked at
            timeout_s=TIMEOUT_S,
        )
        return [[content_of(model) for model in engine.models] for engine in engines], max(messages)

    def _side(self, name: Name, world: World) -> tuple[TrainShard, Reshard]:
        layout = self.layout
        shard = TrainShard(self.arch, layout, rank=world.rank, dtype=getattr(torch, self.case.dtypes[0]))
        placed = place_engines(
            world_size=world.size,
            tensor=layout.engine_tensor,
            ranks_per_node=world.ranks_per_node,
            train_tensor=layout.train.tp,
        )
        dtype = getattr(torch, self.case.dtypes[1])
        engines = Engines(placed, layout.engine_tensor, layout.engine_expert, dtype)
        settings = ReshardSettings(bytes_per_bucket=1 << 14, timeout_s=TIMEOUT_S)
        return shard, Reshard(name, stream_of(shard), self.arch, engines, world, settings)


class ModelsOfEngine:
    """All that a transport asks of an engine: hand each rank its part of a payload, at once, as SGLang does."""

    incarnation = 1

    def __init__(self, models: Sequence[Any]) -> None:
        self.tensor, self.models = len(models), models

    def update_weights(self, named_tensors: Sequence[tuple[str, Any]], *, load_format: str) -> None:
        module, function = load_format.rsplit(".", 1)
        load = getattr(importlib.import_module(module), function)
        payloads = [[(name, of_rank[rank]) for name, of_rank in named_tensors] for rank in range(self.tensor)]
        with ThreadPoolExecutor(self.tensor, thread_name_prefix="worker") as executor:
            list(executor.map(load, self.models, payloads))


def stream_of(shard: TrainShard) -> TensorStream:
    """Without a group: the reshard gathers nothing over a replica."""
    return shard.stream(cast(Any, None))


def fill(shard: TrainShard, weights: Content) -> None:
    """What this rank holds of a checkpoint, in place; what Megatron pads with, and the gaps in its buffers, are NaN."""
    for buffer in shard.buffers:
        buffer.fill_(float("nan"))
    for rule in shard.held:
        size, rank = shard.cut(rule)
        for piece in rule.pieces(size=size, rank=rank):
            shard.parameters[rule.parameter][slices(piece.target)] = weights[piece.name][slices(piece.source)]


def content_of(model: Any) -> Content:
    """Copies of every parameter, and of every other tensor that a module keeps besides."""
    found = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": value.clone() for name, value in vars(module).items() if isinstance(value, Tensor)}
    return found


def differences(found: Content, expected: Content) -> Iterator[str]:
    """A line for each name with another tensor on either side; equal are those of equal bits."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found or name not in expected:
            yield f"{name} is in {'the loaded' if name in expected else 'the resharded'} model alone"
            continue
        one, other = found[name], expected[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            yield f"{name} is {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
            continue
        places = (bits(one) != bits(other)).nonzero()
        if len(places):
            at = tuple(places[0].tolist())
            yield f"{name}: {len(places)} of {one.numel()} elements, first {list(at)}: {one[at]}, not {other[at]}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def outcome_of(case: Case, directory: Path) -> Outcome:
    """Of the last of two publishes by either transport, against a model that was loaded once."""
    scene = Scene(case, directory)
    expected = scene.loaded(seed=1)
    lines, messages = [], {}
    for name in TRANSPORTS:
        engines, messages[name] = scene.resharded(name, seeds=(0, 1))
        for number, engine in enumerate(engines):
            for rank, found in enumerate(engine):
                where = f"{name}, engine {number}, rank {rank}"
                lines += [f"{where}: {line}" for line in differences(found, expected[rank])]
    return Outcome(sorted({name for of_rank in expected for name in of_rank}), lines, messages)


def run(case: Case, directory: Path) -> Outcome:
    """A case that fails is one that differs: the others shall be heard of too."""
    try:
        return outcome_of(case, directory)
    except Exception:
        return Outcome([], [traceback.format_exc()], {})


def main(cases: Path, outcomes: Path) -> None:
    torch.set_num_threads(1)
    leave_out_other_models()
    given: list[Case] = torch.load(cases, weights_only=False)
    found = [run(case, outcomes.parent / str(number)) for number, case in enumerate(given)]
    outcomes.write_text(json.dumps([asdict(outcome) for outcome in found]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
