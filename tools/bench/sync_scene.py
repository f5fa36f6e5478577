"""What the sides of the weight sync benchmark share on one rank: its shard of the learner and its engine.

In: a model, a layout and the ranks that torchrun started. Out: a `Scene`. Must never import megatron.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from bench.stand_in_engine import StandInEngine
from bench.sync_layout import SyncLayout
from bench.synthetic_model import TrainShard
from bench.worker_server import WorkerServer

from rlmegatron.distributed.world import World
from rlmegatron.models.architecture import Architecture


@dataclass(frozen=True)
class Scene:
    """`engine` is None on ranks that lead none; `group` is that of this rank's replica."""

    world: World
    shard: TrainShard
    group: dist.ProcessGroup
    engine: StandInEngine | None
    engine_dtype: torch.dtype
    bytes_per_bucket: int
    timeout_s: float


def gloo_world(timeout_s: float) -> World:
    """The ranks that torchrun started, or this process alone; their device is the CPU, whatever else is there."""
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        torch.set_num_threads(1)
        if "MASTER_ADDR" not in os.environ:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", timeout=timeout)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=torch.device("cpu"),
        control=dist.new_group(backend="gloo", timeout=timeout),
    )


def build_scene(
    arch: Architecture,
    layout: SyncLayout,
    world: World,
    undo: ExitStack,
    *,
    train_dtype: torch.dtype,
    engine_dtype: torch.dtype,
    bytes_per_bucket: int,
    timeout_s: float,
) -> Scene:
    """Collective. Engines start while weights are made up; `undo` ends them.

    What any first communication costs, with an engine or between ranks, is behind it then and counts for nobody.
    """
    if world.ranks_per_node != world.size:
        raise ValueError(f"all ranks must be on one machine; {world.ranks_per_node} of {world.size} are on this one")
    server = undo.enter_context(WorkerServer()) if world.is_lead else None
    address = world.lead(lambda: server.address if server is not None else "")
    engine = None
    if layout.engine_rank(world.rank)[1] == 0:
        engine = StandInEngine(
            arch,
            tensor=layout.engine_tensor,
            expert=layout.engine_expert,
            dtype=engine_dtype,
            on_cpu=True,
            server=address,
        )
        undo.enter_context(engine)
    shard = world.settle("model", lambda: TrainShard(arch, layout, rank=world.rank, dtype=train_dtype))
    shard.fill(seed=0)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in layout.replicas}
    world.settle("engines", lambda: _warm_up(engine) if engine is not None else None)
    world.exchange([None] * world.size)
    return Scene(
        world=world,
        shard=shard,
        group=next(group for ranks, group in groups.items() if world.rank in ranks),
        engine=engine,
        engine_dtype=engine_dtype,
        bytes_per_bucket=bytes_per_bucket,
        timeout_s=timeout_s,
    )


def _warm_up(engine: StandInEngine) -> None:
    """The first tensor handed over starts torch's manager of shared memory on both sides."""
    engine.begin_weight_update()
    engine.update_weights([("nothing", torch.zeros(1))])
    engine.end_weight_update(version=0)
