"""A training rank's side of the collective: pack, swap within the group, hand over to the worker; two in flight.

In: packing tables and a `Swap`. Out: the engine's worker has scattered every bucket. A rank whose own worker or packing
fails still takes part to the end, so that its group does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.weight_sync.channel import Line, LineClosed, Port
from rlmegatron.weight_sync.plan import Ints
from rlmegatron.weight_sync.segments import SegmentTable, copy_segments
from rlmegatron.weight_sync.shared_memory import Handle, export
from rlmegatron.weight_sync.swaps import Swap

IN_FLIGHT = 2
CALL_WITHIN_S = 60.0
"""How long a worker may take from the lead's order to its call."""


@dataclass
class BucketGroup:
    """What one rank needs to take part: `packing[k]` [N 8] are segments from `sources` into bucket k, which is seen as
    fp32 (0) and as bf16 (1)."""

    swap: Swap
    packing: Sequence[Ints]
    sources: Sequence[Tensor]
    device: torch.device
    timeout_s: float
    port: Port = field(default_factory=Port)

    def __post_init__(self) -> None:
        self._buckets: list[Tensor] = []
        self._packing: list[SegmentTable] = []
        if self.device.type == "cpu":
            self.handles()  # moves them, while a failure is still everybody's

    @property
    def received(self) -> int:
        """Bytes that an exchange brings from other ranks."""
        return sum(self.swap.received(number) for number in range(self.swap.num_buckets))

    @property
    def num_bytes(self) -> int:
        """Memory that buckets take during an exchange."""
        return min(IN_FLIGHT, self.swap.num_buckets) * self.swap.bucket_bytes

    def handles(self) -> list[list[Handle]]:
        """Of each bucket of the next exchange, seen as fp32 and as bf16."""
        if not self._buckets:
            count, size = min(IN_FLIGHT, self.swap.num_buckets), self.swap.bucket_bytes
            self._buckets = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return [[export(view) for view in _views(bucket)] for bucket in self._buckets]

    def exchange(self, *, is_alive: Callable[[], bool]) -> None:
        """Collective over the group, after `handles`. Raises at its end what went wrong on this rank's side."""
        worker = _Worker(self.port, self.timeout_s, is_alive)
        failed = True
        try:
            failure = self._exchange(worker)
            failed = failure is not None
        finally:  # also when the group breaks: the worker must not wait for what will never come
            worker.hang_up(failed=failed)
        if failure or worker.failure:
            raise failure or worker.failure  # type: ignore[misc]

    def _exchange(self, worker: _Worker) -> Exception | None:
        """The first failure to pack."""
        failure: Exception | None = None
        num_buckets = self.swap.num_buckets
        gathering: list[tuple[int, list[dist.Work]]] = []
        for number in range(num_buckets):
            worker.wait_until_done(number - IN_FLIGHT)
            try:
                self._pack(number)
            except Exception as error:
                failure = failure or error
            gathering.append((number, self.swap.begin(number, self._bucket(number))))
            if len(gathering) == IN_FLIGHT:
                self._hand_over(*gathering.pop(0), worker)
        for number, works in gathering:
            self._hand_over(number, works, worker)
        for number in range(max(0, num_buckets - IN_FLIGHT), num_buckets):
            worker.wait_until_done(number)
        return failure

    def _pack(self, number: int) -> None:
        if not self._packing:
            views = _views(self._buckets[0])
            self._packing = [SegmentTable.of(table, self.sources, views) for table in self.packing]
        copy_segments(self._packing[number], self.sources, _views(self._bucket(number)))

    def _bucket(self, number: int) -> Tensor:
        return self._buckets[number % IN_FLIGHT]

    def _hand_over(self, number: int, works: Sequence[dist.Work], worker: _Worker) -> None:
        for work in works:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        worker.tell(number)


def _views(bucket: Tensor) -> list[Tensor]:
    return [bucket.view(torch.float32), bucket.view(torch.bfloat16)]


class _Worker:
    """The line to the engine's worker, which may break: then `failure` says so, and the rest goes nowhere."""

    def __init__(self, port: Port, timeout_s: float, is_alive: Callable[[], bool]) -> None:
        self.failure: Exception | None = None
        self._port, self._timeout_s, self._is_alive = port, timeout_s, is_alive
        self._line: Line | None = None

    def tell(self, number: int) -> None:
        """Bucket `number` is ready."""
        self._try(lambda line: line.send(number))

    def wait_until_done(self, number: int) -> None:
        """Until the worker has read bucket `number`."""
        if number >= 0:
            self._try(lambda line: line.expect(number, timeout_s=self._timeout_s))

    def hang_up(self, *, failed: bool) -> None:
        """Nothing more will come; a worker that waits for more learns that it will not."""
        if self._line is not None:
            if failed:
                self._line.give_up()
            self._line.close()

    def _try(self, act: Callable[[Line], None]) -> None:
        if self.failure is not None:
            return
        try:
            if self._line is None:
                self._line = self._port.accept(timeout_s=min(CALL_WITHIN_S, self._timeout_s), is_alive=self._is_alive)
            act(self._line)
        except (LineClosed, TimeoutError) as error:
            self.failure = RuntimeError(f"the engine's worker on this device did not take the weights: {error}")
