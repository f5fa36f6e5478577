"""Which ranks form which engine, and which devices and cores it gets, against layouts worked out by hand."""

import re
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlmegatron.platform.sglang_cpu import parse_cores
from rlmegatron.rollout.placement import engine_cores, engine_of, place_engines, share_cores, visible_devices


@pytest.mark.parametrize(
    ("train_tensor", "tensor", "world_size", "engines"),
    [
        (8, 2, 8, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (4, 1, 4, [(0,), (1,), (2,), (3,)]),
        (4, 2, 8, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (8, 4, 8, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        (2, 2, 4, [(0, 1), (2, 3)]),
        (2, 4, 8, [(0, 2, 1, 3), (4, 6, 5, 7)]),
        (2, 8, 8, [(0, 2, 4, 6, 1, 3, 5, 7)]),
        (1, 4, 4, [(0, 1, 2, 3)]),
        (4, 3, 12, [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]),
        (6, 4, 12, [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]),
    ],
)
def test_engines_lie_as_worked_out_by_hand(
    train_tensor: int, tensor: int, world_size: int, engines: list[tuple[int, ...]]
) -> None:
    placements = place_engines(world_size=world_size, tensor=tensor, ranks_per_node=12, train_tensor=train_tensor)
    assert [placement.ranks for placement in placements] == engines
    assert [placement.index for placement in placements] == list(range(len(engines)))
    assert [placement.lead for placement in placements] == [ranks[0] for ranks in engines]


def test_devices_are_counted_on_each_node() -> None:
    placements = place_engines(world_size=8, tensor=2, ranks_per_node=4, train_tensor=4)
    assert [placement.ranks for placement in placements] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [placement.node for placement in placements] == [0, 0, 1, 1]
    assert [placement.local_ranks for placement in placements] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert engine_of(6, placements).index == 2


def test_tensor_parallelism_over_two_nodes_leaves_engines_on_one() -> None:
    """A stride of two would put ranks 0 and 2 into one engine, and 1 and 3."""
    placements = place_engines(world_size=4, tensor=2, ranks_per_node=2, train_tensor=4)
    assert [placement.ranks for placement in placements] == [(0, 1), (2, 3)]
    assert [placement.local_ranks for placement in placements] == [(0, 1), (0, 1)]


sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(deadline=None)
@given(train_tensor=sizes, tensor=sizes, num_blocks=st.integers(1, 3), ranks_per_node=st.sampled_from([24, 48, 1024]))
def test_engines_share_out_the_ranks_and_none_spans_nodes(
    train_tensor: int, tensor: int, num_blocks: int, ranks_per_node: int
) -> None:
    world_size = 48 * num_blocks if ranks_per_node < 1024 else 24 * num_blocks
    placements = place_engines(
        world_size=world_size, tensor=tensor, ranks_per_node=ranks_per_node, train_tensor=train_tensor
    )
    assert sorted(rank for placement in placements for rank in placement.ranks) == list(range(world_size))
    assert [placement.lead for placement in placements] == sorted(min(placement.ranks) for placement in placements)
    for placement in placements:
        assert len(placement.ranks) == tensor
        for rank, local_rank in zip(placement.ranks, placement.local_ranks, strict=True):
            assert rank == placement.node * ranks_per_node + local_rank


@settings(deadline=None)
@given(train_tensor=sizes, tensor=sizes, num_blocks=st.integers(1, 3))
def test_where_one_size_divides_the_other_the_smaller_share_of_a_rank_lies_in_the_larger(
    train_tensor: int, tensor: int, num_blocks: int
) -> None:
    """A rank trains part r of `train_tensor`, r its place in its training group, and serves part j of `tensor`."""
    assume(train_tensor % tensor == 0 or tensor % train_tensor == 0)
    world_size = 24 * num_blocks
    placements = place_engines(world_size=world_size, tensor=tensor, ranks_per_node=1024, train_tensor=train_tensor)
    for placement in placements:
        for part, rank in enumerate(placement.ranks):
            serves = Fraction(part, tensor), Fraction(part + 1, tensor)
            trains = Fraction(rank % train_tensor, train_tensor), Fraction(rank % train_tensor + 1, train_tensor)
            inner, outer = (serves, trains) if tensor > train_tensor else (trains, serves)
            assert outer[0] <= inner[0] and inner[1] <= outer[1]


def test_a_world_smaller_than_a_node_is_one_node() -> None:
    (placement,) = place_engines(world_size=2, tensor=2, ranks_per_node=8, train_tensor=1)
    assert placement.ranks == (0, 1) and placement.node == 0


def test_an_engine_rank_gets_the_cores_of_the_rank_beside_it() -> None:
    _, second = place_engines(world_size=8, tensor=4, ranks_per_node=4, train_tensor=2)
    assert second.ranks == (4, 6, 5, 7)
    assert engine_cores(second, range(8), ranks_per_node=4) == ("0-1", "4-5", "2-3", "6-7")


@pytest.mark.parametrize(
    ("inherited", "num_visible", "expected"),
    [
        (None, 4, "0,2,1,3"),
        (None, 6, "0,2,1,3,4,5"),
        ("4,5,6,7", 4, "4,6,5,7"),
        ("7, 6,5 ,4", 4, "7,5,6,4"),
        ("GPU-aa,GPU-bb,GPU-cc,MIG-dd", 4, "GPU-aa,GPU-cc,GPU-bb,MIG-dd"),
        ("3,2,1,0,-1,5", 4, "3,1,2,0"),
    ],
)
def test_an_engine_sees_its_own_devices_first_and_in_the_order_of_its_ranks(
    inherited: str | None, num_visible: int, expected: str
) -> None:
    """CUDA sees none of what follows an entry that it cannot use, as -1."""
    assert visible_devices((0, 2, 1, 3), inherited=inherited, num_visible=num_visible) == expected


@pytest.mark.parametrize(("inherited", "said"), [(None, "is not set"), ("1", "is '1'")])
def test_a_device_that_is_out_of_sight_is_named(inherited: str | None, said: str) -> None:
    message = f"an engine rank needs device 4, but this process sees 1 (CUDA_VISIBLE_DEVICES {said})"
    with pytest.raises(ValueError, match=re.escape(message)):
        visible_devices((0, 4), inherited=inherited, num_visible=1)


def test_a_size_that_does_not_divide_the_world_names_those_that_do() -> None:
    with pytest.raises(
        ValueError, match=r"rollout.tensor: 4 does not divide the world size \(6\); use one of 1, 2, 3, 6"
    ):
        place_engines(world_size=6, tensor=4, ranks_per_node=6, train_tensor=2)


def test_an_engine_over_two_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="engines of 4 ranks would span nodes of 2 ranks; use one of 1, 2"):
        place_engines(world_size=4, tensor=4, ranks_per_node=2, train_tensor=2)


@pytest.mark.parametrize(
    ("cores", "num_shares", "expected"),
    [
        (range(8), 2, ("0-3", "4-7")),
        ([0, 1, 2, 8, 9], 2, ("0-1", "2,8-9")),
        ([3], 2, ("3", "3")),
        ([4, 6], 3, ("4", "6", "4")),
        (range(3), 1, ("0-2",)),
    ],
)
def test_cores_are_shared_as_worked_out_by_hand(cores: list[int], num_shares: int, expected: tuple[str, ...]) -> None:
    assert share_cores(cores, num_shares=num_shares) == expected


@settings(deadline=None)
@given(cores=st.sets(st.integers(0, 300), min_size=1), num_shares=st.integers(1, 20))
def test_every_core_goes_to_exactly_one_share_while_there_are_enough(cores: set[int], num_shares: int) -> None:
    shares = [parse_cores(share) for share in share_cores(sorted(cores), num_shares=num_shares)]
    assert len(shares) == num_shares and all(shares)
    if len(cores) >= num_shares:
        assert sorted(core for share in shares for core in share) == sorted(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_no_cores_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot split 0 cores over 2 engine ranks"):
        share_cores([], num_shares=2)
