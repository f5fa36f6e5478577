"""Who stands where, against Megatron's own rank generator, the engines of a run, and numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlmegatron.config.layout import Layout, smallest_world
from rlmegatron.config.schema import ParallelConfig
from rlmegatron.rollout.placement import place_engines

SIZES = [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 3, 4), (8, 2, 4)]


def layout(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    virtual: int = 1,
    engine: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
) -> Layout:
    return Layout(
        world=tensor * pipeline * data,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        engine_tensor=engine,
        expert=expert,
        expert_tensor=expert_tensor,
    )


@pytest.mark.parametrize(("tensor", "pipeline", "data"), SIZES)
def test_groups_are_those_of_megatrons_default_order(tensor: int, pipeline: int, data: int) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    megatron = parallel_state.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    ours = layout(tensor=tensor, pipeline=pipeline, data=data)
    for axis in ("tp", "dp", "pp"):
        assert sorted(ours.groups(axis)) == sorted(megatron.get_ranks(axis))


@pytest.mark.parametrize(
    ("expert_tensor", "expert", "pipeline"), [(1, 1, 1), (2, 1, 1), (1, 4, 2), (2, 2, 2), (4, 3, 1)]
)
def test_expert_groups_are_those_of_megatrons_default_order(expert_tensor: int, expert: int, pipeline: int) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    ours = layout(tensor=2, data=12 // pipeline, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor)
    megatron = parallel_state.RankGenerator(
        tp=expert_tensor,
        ep=expert,
        dp=24 // (expert_tensor * expert * pipeline),
        pp=pipeline,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    for axis, of_megatron in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp")):
        assert sorted(ours.groups(axis)) == sorted(megatron.get_ranks(of_megatron))
    assert ours.expert_data == len(ours.groups("edp")[0])


def test_coordinates_of_rank_13_in_a_world_of_24() -> None:
    at = layout(tensor=2, pipeline=3, data=4).coordinates(13)
    assert (at.tp, at.dp, at.pp) == (1, 2, 1)
    assert layout(tensor=2, pipeline=3, data=4).stage_ranks(1) == range(8, 16)


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 3), (3, 4)])
def test_every_layer_is_held_once_and_chunks_follow_each_other_round_the_stages(pipeline: int, virtual: int) -> None:
    sizes = layout(pipeline=pipeline, virtual=virtual)
    order = [sizes.stage_layers(stage, num_layers=24)[chunk] for chunk in range(virtual) for stage in range(pipeline)]
    assert [layer for layers in order for layer in layers] == list(range(24))


def test_interleaved_stages_hold_the_layers_that_megatron_gives_them() -> None:
    sizes = layout(pipeline=2, virtual=2)
    assert sizes.stage_layers(0, num_layers=8) == [range(2), range(4, 6)]
    assert sizes.stage_layers(1, num_layers=8) == [range(2, 4), range(6, 8)]


@pytest.mark.parametrize(
    ("tensor", "engine", "per_node", "first"), [(4, 2, 8, (0, 2)), (2, 4, 8, (0, 2, 1, 3)), (16, 2, 8, (0, 1))]
)
def test_engines_are_those_that_a_run_starts(tensor: int, engine: int, per_node: int, first: tuple[int, ...]) -> None:
    """Training over 16 ranks reaches over two nodes, and engines do not follow it there."""
    ours = replace(layout(tensor=tensor, data=16 // tensor, engine=engine), ranks_per_node=per_node)
    placements = place_engines(world_size=16, tensor=engine, ranks_per_node=per_node, train_tensor=tensor)
    assert ours.engines() == [placement.ranks for placement in placements]
    assert len(placements) == ours.num_engines
    assert placements[0].ranks == first


@pytest.mark.parametrize(
    ("sizes", "engine", "size"),
    [
        ({}, 1, 1),
        ({"tensor": 2, "pipeline": 2}, 1, 4),
        ({"tensor": 2, "pipeline": 3}, 4, 12),
        ({"tensor": 8}, 2, 8),
        ({"expert": 4}, 1, 4),
        ({"tensor": 2, "expert": 4}, 1, 4),
        ({"tensor": 2, "pipeline": 2, "expert": 3}, 4, 12),
        ({"tensor": 4, "expert": 2, "expert_tensor": 3}, 8, 24),
    ],
)
def test_smallest_world_holds_whole_models_and_engines(sizes: dict[str, int], engine: int, size: int) -> None:
    assert smallest_world(ParallelConfig(**sizes), engine_tensor=engine) == size
