"""Which rank stands where: the axes of training, the layers of a stage, and which ranks form which engine.

In: parallel sizes. Out: plain records. Must never import torch; nothing here looks at a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal

from rlmegatron.config.partition import engine_groups, ranks_per_stage, stage_sizes
from rlmegatron.config.schema import ParallelConfig, RunConfig

Axis = Literal["tp", "dp", "pp", "etp", "ep", "edp"]


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place on each parallel axis; `etp`, `ep` and `edp` are those of the experts."""

    rank: int
    tp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of every axis; world = tensor x data x pipeline = expert_tensor x expert x expert_data x pipeline."""

    world: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    engine_tensor: int
    expert: int = 1
    expert_tensor: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    ranks_per_node: int | None = None
    """None where all ranks are on one."""

    def __post_init__(self) -> None:
        assert self.world % (self.tensor * self.pipeline) == 0, f"no whole data parallelism in {self}"
        assert self.world % (self.expert_tensor * self.expert * self.pipeline) == 0, f"no whole experts in {self}"
        assert self.world % self.engine_tensor == 0, f"no whole engines in {self}"

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return self.world // self.engine_tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands in Megatron's default order: tp varies fastest, then dp, and pp slowest.

        The experts' axes cut the same stage anew: etp varies fastest, then ep, then edp.
        """
        assert 0 <= rank < self.world, f"rank {rank} is not in a world of {self.world}"
        pp, in_stage = divmod(rank, self.tensor * self.data)
        dp, tp = divmod(in_stage, self.tensor)
        rest, etp = divmod(in_stage, self.expert_tensor)
        edp, ep = divmod(rest, self.expert)
        return Coordinates(rank=rank, tp=tp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp)

    def groups(self, axis: Axis) -> list[list[int]]:
        """The ranks that communicate along `axis`: those that differ in no other coordinate of its kind."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            other = {
                "tp": (at.dp, at.pp),
                "dp": (at.tp, at.pp),
                "pp": (at.tp, at.dp),
                "etp": (at.ep, at.edp, at.pp),
                "ep": (at.etp, at.edp, at.pp),
                "edp": (at.etp, at.ep, at.pp),
            }[axis]
            members.setdefault(other, []).append(rank)
        return list(members.values())

    def stage_ranks(self, stage: int) -> range:
        """The ranks of a pipeline stage, which are consecutive."""
        size = self.tensor * self.data
        return range(stage * size, (stage + 1) * size)

    def engines(self) -> list[tuple[int, ...]]:
        """The ranks of every engine in the order of its own ranks, the first of which owns its server."""
        return engine_groups(
            world_size=self.world,
            tensor=self.engine_tensor,
            train_tensor=self.tensor,
            ranks_per_node=self.ranks_per_node,
        )

    def stage_layers(self, stage: int, *, num_layers: int) -> list[range]:
        """The layers of a stage, one range per model chunk; with VPP chunk v of stage p is the (v * PP + p)-th cut."""
        sizes = stage_sizes(
            num_layers=num_layers,
            pp=self.pipeline,
            vpp=self.virtual_pipeline,
            first=self.first_layers,
            last=self.last_layers,
        )
        starts = [chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(self.virtual_pipeline)]
        return [range(start, start + sizes[stage]) for start in starts]


def layout_of(cfg: RunConfig, *, world_size: int, ranks_per_node: int | None = None) -> Layout:
    """The layout of a config whose rules hold; `ranks_per_node` is None where all ranks are on one."""
    sizes = cfg.parallel
    return Layout(
        world=world_size,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual_pipeline=sizes.virtual_pipeline,
        engine_tensor=cfg.rollout.tensor,
        expert=sizes.expert,
        expert_tensor=sizes.expert_tensor,
        first_layers=sizes.first_stage_layers,
        last_layers=sizes.last_stage_layers,
        ranks_per_node=ranks_per_node,
    )


def model_ranks(sizes: ParallelConfig) -> int:
    """The fewest ranks that hold a whole model: each stage whole tensor-parallel groups and whole sets of experts."""
    return sizes.pipeline * ranks_per_stage(tensor=sizes.tensor, expert=sizes.expert, expert_tensor=sizes.expert_tensor)


def smallest_world(sizes: ParallelConfig, *, engine_tensor: int) -> int:
    """The fewest ranks that hold whole models and whole engines."""
    return lcm(model_ranks(sizes), engine_tensor)
