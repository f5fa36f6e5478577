"""Agreement between ranks: `lead`, `settle`, `gather`, `exchange`, with every error path.

What this does not prove: behaviour when a machine vanishes; there the time-out of the process group ends the run.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from ranks import RanksFailed, run_ranks

from rlmegatron.distributed.world import RankFailure, World, start_world


def message_of(action: Any, *args: Any) -> str:
    """The text of the RankFailure that `action` must raise here."""
    try:
        action(*args)
    except RankFailure as failure:
        return str(failure)
    raise AssertionError("no RankFailure was raised")


def agree() -> dict[str, Any]:
    world = start_world(timeout_s=30)
    calls: list[int] = []

    def decide() -> dict[str, int]:
        calls.append(world.rank)
        return {"decided by": world.rank}

    return {
        "identity": (world.rank, world.size, world.local_rank, world.ranks_per_node, world.is_lead),
        "lead": world.lead(decide),
        "calls": calls,
        "settle": world.settle("square", lambda: world.rank**2),
        "gather": world.gather(("rank", world.rank)),
        "exchange": world.exchange(outgoing(world)),
        "errors": errors(world),
        "after errors": world.gather(world.rank),
    }


def outgoing(world: World) -> list[bytes]:
    """Every pair of ranks with a size of its own."""
    return [f"{world.rank}>{to}".encode() * (1000 * world.rank + 10 * to) for to in range(world.size)]


def errors(world: World) -> dict[str, str]:
    def fail(error: Exception, on: int) -> None:
        if world.rank == on:
            raise error

    def nested() -> None:
        world.lead(lambda: fail(ValueError("algorithm.gamma: 2 is above 1"), 0))

    last = world.size - 1
    return {
        "lead, user": message_of(world.lead, lambda: fail(ValueError("algorithm.gamma: 2 is above 1"), 0)),
        "lead, ours": message_of(world.lead, lambda: fail(ZeroDivisionError("oops"), 0)),
        "settle, user": message_of(world.settle, "load", lambda: fail(ValueError("no such file"), last)),
        "settle, ours": message_of(world.settle, "load", lambda: fail(KeyError("weight"), last)),
        "lead within lead": message_of(world.lead, lambda: fail(RankFailure("the report"), 0)),
        "lead, again": message_of(nested),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_agree(size: int) -> None:
    results = run_ranks(agree, size)
    for rank, result in enumerate(results):
        assert result["identity"] == (rank, size, rank, size, rank == 0)
        assert result["lead"] == {"decided by": 0}
        assert result["calls"] == ([0] if rank == 0 else [])
        assert result["settle"] == rank**2
        assert result["gather"] == [("rank", other) for other in range(size)]
        assert result["exchange"] == [f"{other}>{rank}".encode() * (1000 * other + 10 * rank) for other in range(size)]
        assert result["after errors"] == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_error_is_raised_alike_on_every_rank(size: int) -> None:
    results = [result["errors"] for result in run_ranks(agree, size)]
    assert all(result == results[0] for result in results)
    found = results[0]
    assert found["lead, user"] == found["lead, again"] == "algorithm.gamma: 2 is above 1"
    assert found["settle, user"] == f"load failed on rank {size - 1}: no such file"
    assert found["lead, ours"].startswith("ZeroDivisionError: oops\n\nTraceback")
    assert found["settle, ours"].startswith(f"load failed on rank {size - 1}: KeyError: 'weight'\n\nTraceback")
    assert found["lead within lead"] == "the report"


def exchange_shared_and_empty() -> tuple[list[Any], int]:
    """Rank 0 sends one object to all; its pickling is counted. The others send None."""
    world = start_world(timeout_s=30)
    Counted.pickled = 0
    shared = Counted() if world.is_lead else None
    return [type(item).__name__ for item in world.exchange([shared] * world.size)], Counted.pickled


class Counted:
    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.pickled += 1
        return Counted, ()


def test_exchange_pickles_a_shared_object_once() -> None:
    results = run_ranks(exchange_shared_and_empty, 3)
    assert [received for received, _ in results] == [["Counted", "NoneType", "NoneType"]] * 3
    assert [pickled for _, pickled in results] == [1, 0, 0]


def fail_alone(kind: str) -> None:
    world = start_world(timeout_s=30)
    if world.rank == 1:
        if kind == "dies":
            os._exit(3)
        raise LookupError("lost")
    world.barrier()


def test_ranks_that_wait_for_a_failed_one_are_ended() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: .*rank 1: Traceback.*LookupError: lost"):
        run_ranks(fail_alone, 2, "raises")
    with pytest.raises(RanksFailed, match="rank 1: the process died"):
        run_ranks(fail_alone, 2, "dies")


def never_answer() -> None:
    time.sleep(60)


def test_ranks_that_do_not_answer_in_time_are_ended() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0: no answer within 1 s.*rank 1: no answer"):
        run_ranks(never_answer, 2, timeout_s=1)
