"""`publish` is all or nothing over the ranks, and its order of calls is fixed.

What this does not prove: that SGLang serves what it was given (see e2e), or anything about device memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from ranks import run_ranks

from rlmegatron.distributed.world import RankFailure, World, start_world
from rlmegatron.rollout.api import EngineError
from rlmegatron.weight_sync.publish import publish

GOOD = ["wake weights", "begin", "transfer", "verify", "end 7"]


@dataclass
class RecordingEngine:
    """Notes every call and fails at one of them; serves only a version whose update was closed."""

    fails_at: str
    tensor: int = 1
    calls: list[str] = field(default_factory=list)
    serves: int | None = 6

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call.split()[0] == self.fails_at:
            raise EngineError(f"{call} went wrong")

    def wake(self, *, weights: bool = False, kv_cache: bool = False) -> None:
        self.note("wake" + " weights" * weights + " kv_cache" * kv_cache)

    def begin_weight_update(self) -> None:
        self.serves = None
        self.note("begin")

    def distrust_weights(self) -> None:
        self.serves = None

    def end_weight_update(self, *, version: int) -> None:
        self.note(f"end {version}")
        self.serves = version


class RecordingTransport:
    """Counts how often this rank took part, with an engine or without."""

    name = "recording"

    def __init__(self) -> None:
        self.taken_part = 0

    def transfer(self, engine: Any) -> None:
        self.taken_part += 1
        if engine is not None:
            engine.note("transfer")


class RecordingVerifier:
    def __init__(self, world: World) -> None:
        self.world = world

    def verify(self, engine: Any) -> None:
        self.world.settle("publish (verify)", lambda: engine.note("verify") if engine is not None else None)


def publish_once(fails_at: str, failing_rank: int, verify: bool) -> tuple[list[str], int | None, int, str]:
    """Ranks 0 and 1 lead an engine each, rank 2 none; (calls, served version, transfers, error) of this rank."""
    world = start_world(timeout_s=30)
    engine = RecordingEngine(fails_at if world.rank == failing_rank else "") if world.rank < 2 else None
    transport, error = RecordingTransport(), ""
    try:
        verifier = RecordingVerifier(world) if verify else None
        publish(world, transport, engine, version=7, verifier=verifier)  # type: ignore[arg-type]
    except RankFailure as failure:
        error = str(failure).splitlines()[0]
    return engine.calls if engine else [], engine.serves if engine else None, transport.taken_part, error


def test_every_engine_serves_the_new_version() -> None:
    assert run_ranks(publish_once, 3, "", -1, True) == [(GOOD, 7, 1, ""), (GOOD, 7, 1, ""), ([], None, 1, "")]


def test_verification_can_be_left_out() -> None:
    expected = [call for call in GOOD if call != "verify"]
    assert [calls for calls, *_ in run_ranks(publish_once, 3, "", -1, False)] == [expected, expected, []]


@pytest.mark.parametrize(
    ("fails_at", "phase", "transfers"),
    [
        ("wake", "open", 0),
        ("begin", "open", 0),
        ("transfer", "transfer", 1),
        ("verify", "verify", 1),
        ("end", "close", 1),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all(fails_at: str, phase: str, transfers: int) -> None:
    """A rank without engine takes part in the transfer all the same, and no engine serves anything, even one that had
    closed its update when another could not."""
    (calls, serves, _, error), (others, other_serves, _, _), (_, _, taken_part, _) = results = run_ranks(
        publish_once, 3, fails_at, 0, True
    )
    assert error.startswith(f"publish ({phase}) failed on rank 0: ") and "went wrong" in error
    assert {failure for *_, failure in results} == {error}
    assert taken_part == transfers
    assert calls[-1].split()[0] == fails_at
    assert ("end 7" in others) is (phase == "close")
    assert serves is None and other_serves is None
