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


@dataclass(frozen=True)
class Topology:
    """Sizes, this rank's coordinates and the groups; `model` holds the tp * pp ranks of one data-parallel replica."""

    tp: int
    pp: int
    vpp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    sequence_parallel: bool
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    collection: ProcessGroupCollection

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.pp_rank == self.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage in this rank's pipeline."""
        return dist.get_global_rank(self.pp_group, self.pp - 1)

    def schedule(self) -> Callable[..., list[Any]]:
        """Megatron's forward-backward function for this pipeline."""
        return get_forward_backward_func()  # type: ignore[no-any-return]


def start_topology(config: ParallelConfig, *, seed: int, timeout_s: float) -> Topology:
    """Create every group of the layout and seed Megatron's generators; ValueError when the world does not fit."""
    world, model_size = dist.get_world_size(), config.tensor * config.pipeline
    if world % model_size:
        raise ValueError(
            f"parallel: {world} ranks cannot hold tensor {config.tensor} x pipeline {config.pipeline}; "
            f"use a multiple of {model_size} ranks"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        distributed_timeout_minutes=max(1, int(timedelta(seconds=timeout_s).total_seconds() // 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Topology(
        tp=config.tensor,
        pp=config.pipeline,
        vpp=config.virtual_pipeline,
        dp=world // model_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        sequence_parallel=config.sequence,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def stop_topology() -> None:
    """Forget the groups, so that a process can start another layout (tests do)."""
    parallel_state.destroy_model_parallel()
