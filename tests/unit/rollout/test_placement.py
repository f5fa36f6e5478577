"""Which ranks form which engine, and how cores are shared, against layouts worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmegatron.platform.sglang_cpu import parse_cores
from rlmegatron.rollout.placement import engine_of, place_engines, share_cores


def test_engines_are_consecutive_ranks_and_count_devices_per_node() -> None:
    placements = place_engines(world_size=8, tensor=2, ranks_per_node=4)
    assert [placement.ranks for placement in placements] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [placement.lead for placement in placements] == [0, 2, 4, 6]
    assert [placement.node for placement in placements] == [0, 0, 1, 1]
    assert [placement.base_gpu_id for placement in placements] == [0, 2, 0, 2]
    assert engine_of(5, placements).index == 2


def test_a_world_smaller_than_a_node_is_one_node() -> None:
    (placement,) = place_engines(world_size=2, tensor=2, ranks_per_node=8)
    assert placement.ranks == (0, 1) and placement.node == 0


def test_a_size_that_does_not_divide_the_world_names_those_that_do() -> None:
    with pytest.raises(
        ValueError, match=r"rollout.tensor: 4 does not divide the world size \(6\); use one of 1, 2, 3, 6"
    ):
        place_engines(world_size=6, tensor=4, ranks_per_node=6)


def test_an_engine_over_two_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="engines of 4 ranks would span nodes of 2 ranks; use one of 1, 2"):
        place_engines(world_size=4, tensor=4, ranks_per_node=2)


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
