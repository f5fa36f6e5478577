"""The weight sync benchmark on real ranks and worker processes: what it counts and what it refuses.

What this does not prove: a single second that it prints.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest
from ranks import RanksFailed, run_ranks

NUMBERS = itertools.count()


def measured(*arguments: str) -> dict[str, Any]:
    """What `tools/bench_weight_sync.py` would write, on the ranks that run; {} on all but the first."""
    import bench_weight_sync
    from bench.sync_scene import gloo_world

    given = bench_weight_sync.parse(["--gb", "0.001", "--rounds", "1", "--timeout", "60", "--check", *arguments])
    with ExitStack() as undo:
        report = bench_weight_sync.measure(given, gloo_world(given.timeout), undo)
    return report.as_data() if report is not None else {}


def measured_in_turn(layouts: list[str], *arguments: str) -> list[dict[str, Any]]:
    return [measured("--layout", layout, *arguments) for layout in layouts]


def measured_where_one_rank_moves_nothing(*arguments: str) -> dict[str, Any]:
    """`hf_stream` leaves out the engine of rank 1 from its second call on."""
    import torch.distributed as dist
    from bench.sync_sides import EngineSide

    transfer = EngineSide.transfer

    def lazy(side: Any) -> None:
        engine, calls = side._scene.engine, next(NUMBERS)
        if dist.get_rank() == 1 and calls > 0:
            object.__setattr__(side._scene, "engine", None)
        transfer(side)
        object.__setattr__(side._scene, "engine", engine)

    EngineSide.transfer = lazy  # type: ignore[method-assign]
    return measured(*arguments)


def of_first(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {side["name"]: side for side in results[0]["transports"]}


def test_every_transport_leaves_the_learner_s_bits_and_strided_engines_receive_the_bound() -> None:
    """tp4 -> tp2. What every rank holds alike, the norms, is not received: hence a little less than the bound."""
    results = run_ranks(measured, 4, "--layout", "tp4->tp2")
    found = of_first(results)
    assert set(found) == {"peer", "collective", "hf_stream", "megatron"} and not results[0]["left_out"]
    assert all(side["checked"] and len(side["rounds_s"]) == 1 for side in found.values())
    for name in ("peer", "collective", "megatron"):
        assert 0.999 < found[name]["received_over_bound"] <= 1, name
    # Of the model's quarters hf_stream brings three to every rank, where one would do.
    assert found["hf_stream"]["received_over_bound"] == pytest.approx(3, rel=0.01)
    assert results[1:] == [{}, {}, {}]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--layout", "tp2pp2->tp1", "--engine-dtype", "bf16"),
        ("--layout", "tp2ep2->tp2ep2", "--family", "qwen3_moe", "--transports", "megatron,peer,hf_stream"),
    ],
)
def test_what_megatron_cannot_do_is_left_out_with_a_reason(arguments: tuple[str, ...]) -> None:
    results = run_ranks(measured, 4, *arguments)
    assert list(results[0]["left_out"]) == ["megatron"] and "megatron" not in of_first(results)
    assert all(side["checked"] for side in of_first(results).values())


def test_megatron_s_own_resharding_is_set_up_right_under_pipeline_and_data_parallelism() -> None:
    layouts = ["tp2pp2->tp1", "tp2->tp1", "tp1->tp2"]
    for result in run_ranks(measured_in_turn, 4, layouts, "--transports", "megatron")[0]:
        assert result["transports"][0]["name"] == "megatron" and result["transports"][0]["checked"]


def test_a_destination_that_was_left_out_is_found() -> None:
    with pytest.raises(RanksFailed, match=r"hf_stream: .* engine rank 0 as the learner has it"):
        run_ranks(measured_where_one_rank_moves_nothing, 2, "--layout", "tp2->tp1", "--transports", "hf_stream")
