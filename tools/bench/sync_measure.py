"""Runs the sides of the weight sync benchmark: each one's first call, one to count and check, then rounds in turn.

In: sides and this rank's world. Out: a `Measured` for each, on every rank. What is timed ends when the last rank has
ended. Must never print.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.count_traffic import counting
from bench.measure import Spread
from bench.process_memory import PeakMemory, held_bytes
from bench.sync_scene import Scene
from bench.sync_sides import Side


@dataclass
class Measured:
    """Of one side; lists over ranks, in their order."""

    name: str
    first_s: float
    received: list[int]
    messages: list[int]
    extra_bytes: list[int]
    is_checked: bool
    rounds_s: list[float] = field(default_factory=list)

    def as_data(self, reference: Measured | None, bound: int) -> dict[str, Any]:
        """For JSON: the summary and everything that it was made from."""
        data = {
            "name": self.name,
            "first_call_s": self.first_s,
            "seconds": as_dict(Spread.of(self.rounds_s)),
            "rounds_s": self.rounds_s,
            "bytes_received": self.received,
            "received_over_bound": max(self.received) / bound if bound else None,
            "extra_bytes": self.extra_bytes,
            "messages": self.messages,
            "checked": self.is_checked,
        }
        if reference is not None:
            data["times_faster"] = as_dict(times_faster(self, reference))
        return data


def times_faster(one: Measured, other: Measured) -> Spread:
    """How many of `one` fit into `other`, round by round, so that a slow spell of the machine counts for neither."""
    pairs = zip(other.rounds_s, one.rounds_s, strict=True)
    return Spread.of([theirs / ours for theirs, ours in pairs])


def as_dict(spread: Spread) -> dict[str, float]:
    """For JSON."""
    return {"median": spread.median, "low_quartile": spread.low, "high_quartile": spread.high}


class Bench:
    """Collective over all ranks. `on_step` is told what is done next."""

    def __init__(self, scene: Scene, on_step: Callable[[str], None]) -> None:
        self._scene, self._on_step = scene, on_step
        self._seed = 0
        self._version = 0
        self._pids = [os.getpid(), *self._own_worker()]

    def _own_worker(self) -> list[int]:
        """The engine worker that shares this rank's device."""
        scene = self._scene
        pids = scene.world.gather(scene.engine.worker_pids if scene.engine is not None else [])
        number, rank = scene.shard.layout.engine_rank(scene.world.rank)
        return [pids[scene.shard.layout.engines[number][0]][rank]]

    def prepare(self, name: str, make: Callable[[Scene], Side], *, check: bool) -> tuple[Side, Measured]:
        """Everything about a side but its rounds."""
        self._on_step(f"{name}: first call")
        side = make(self._scene)
        gc.freeze()  # or every look at memory would walk over all that imports have left
        before = self._level(side)
        first_s = self._timed(lambda: _first_call(side))
        kept = self._level() - before
        self._on_step(f"{name}: counted call" + " and check" * check)
        self._change_weights()
        before = self._level(side)
        with counting(self._scene.world.control) as traffic, PeakMemory(self._pids) as peak:
            self._timed(side.transfer)
        extra = kept + max(0, peak.bytes - before)
        received, messages = side.counted() or (traffic.received, traffic.messages)
        if check:
            self._scene.world.settle("check", lambda: self._check(name, side))
        gather = self._scene.world.gather
        return side, Measured(name, first_s, gather(received), gather(messages), gather(max(0, extra)), check)

    def rounds(self, sides: Mapping[str, tuple[Side, Measured]], *, num_rounds: int) -> None:
        """All sides in turn; every second round backwards, so that a steady drift favours nobody."""
        for number in range(num_rounds):
            self._on_step(f"round {number + 1} of {num_rounds}")
            for name in turns(list(sides), number):
                side, measured = sides[name]
                measured.rounds_s.append(self._timed(side.transfer))

    def _timed(self, work: Callable[[], object]) -> float:
        """Seconds, inside of an update of the engines, which opens and closes outside."""
        world, engine = self._scene.world, self._scene.engine
        self._version += 1
        world.settle("open", lambda: engine.begin_weight_update() if engine is not None else None)
        world.barrier()
        started = time.perf_counter()
        work()
        world.barrier()
        seconds = time.perf_counter() - started
        version = self._version
        world.settle("close", lambda: engine.end_weight_update(version=version) if engine is not None else None)
        return seconds

    def _change_weights(self) -> None:
        """As a training step does, so that what is moved is not what was there already."""
        self._seed += 1
        self._scene.shard.fill(seed=self._seed)

    def _level(self, side: Side | None = None) -> int:
        """Bytes that this rank and its worker hold while nothing happens; spoiled destinations are all there."""
        world = self._scene.world
        if side is not None:
            world.settle("spoil", side.spoil)
        world.barrier()
        found = held_bytes(self._pids)
        world.barrier()
        return found

    def _check(self, name: str, side: Side) -> None:
        try:
            side.check(seed=self._seed)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _first_call(side: Side) -> None:
    side.build()
    side.transfer()


def turns(names: Sequence[str], round_number: int) -> list[str]:
    """The order of one round."""
    return list(names) if round_number % 2 == 0 else list(names)[::-1]
