"""Megatron's process groups for one layout, and this rank's place in them.

In: parallel sizes. Out: `Topology` with groups to pass as arguments. This is the one module that names
megatron.core.parallel_state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from rlmegatron.config.schema import ParallelConfig
from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.models.rules import Axis, Stage, stages


@dataclass(frozen=True)
class Topology:
    """Sizes, this rank's coordinates and the groups.

    Experts are cut over `etp` x `ep` ranks of a stage, whatever cuts the rest. `replica_group` holds the fewest ranks
    that together hold a whole model, stage by stage.
    """

    tp: int
    pp: int
    vpp: int
    dp: int
    ep: int
    etp: int
    first_stage_layers: int | None
    last_stage_layers: int | None
    tp_rank: int
    pp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    sequence_parallel: bool
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    replica_layout: ReplicaLayout
    replica_group: dist.ProcessGroup
    collection: ProcessGroupCollection

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.pp_rank == self.pp - 1

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's replica is that of rank 0."""
        return dist.get_global_rank(self.replica_group, 0) == 0

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage in this rank's pipeline."""
        return dist.get_global_rank(self.pp_group, self.pp - 1)

    def stages(self, num_layers: int) -> dict[tuple[int, int], Stage]:
        """(pipeline rank, chunk) -> the layers it holds."""
        return stages(
            num_layers=num_layers,
            pp=self.pp,
            vpp=self.vpp,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
        )

    def local_experts(self, num_experts: int) -> range:
        """Global numbers of the experts that this rank holds (a slice of)."""
        num_local = num_experts // self.ep
        return range(self.ep_rank * num_local, (self.ep_rank + 1) * num_local)

    def cut(self, axis: Axis) -> tuple[int, int]:
        """(size, rank) of an axis that cuts parameters."""
        return (self.tp, self.tp_rank) if axis == "tp" else (self.etp, self.etp_rank)

    def schedule(self) -> Callable[..., list[Any]]:
        """Megatron's forward-backward function for this pipeline."""
        return get_forward_backward_func()  # type: ignore[no-any-return]


def start_topology(config: ParallelConfig, *, seed: int, timeout_s: float) -> Topology:
    """Create every group of the layout and seed Megatron's generators; ValueError when the world does not fit."""
    world = dist.get_world_size()
    layout = ReplicaLayout(config.tensor, config.pipeline, ep=config.expert, etp=config.expert_tensor)
    block = layout.per_stage
    if world % (block * config.pipeline):
        experts = f" with experts over {config.expert_tensor} x {config.expert}" if block > config.tensor else ""
        raise ValueError(
            f"parallel: {world} ranks cannot hold tensor {config.tensor} x pipeline {config.pipeline}{experts}; use a "
            f"multiple of {block * config.pipeline} ranks"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        distributed_timeout_minutes=max(1, int(timedelta(seconds=timeout_s).total_seconds() // 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Topology(
        tp=config.tensor,
        pp=config.pipeline,
        vpp=config.virtual_pipeline,
        dp=world // (config.tensor * config.pipeline),
        ep=config.expert,
        etp=config.expert_tensor,
        first_stage_layers=config.first_stage_layers,
        last_stage_layers=config.last_stage_layers,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        sequence_parallel=config.sequence,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        replica_layout=layout,
        replica_group=_replica_group(layout, world),
        collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def _replica_group(layout: ReplicaLayout, world: int) -> dist.ProcessGroup:
    """Every rank makes the groups of all replicas; the value is that of its own."""
    mine = None
    for ranks in layout.replicas(world):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def stop_topology() -> None:
    """Forget the groups, so that a process can start another layout (tests do)."""
    parallel_state.destroy_model_parallel()
