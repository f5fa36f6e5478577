"""A rollout engine that only takes weights: a worker process per rank and SGLang's way of handing it payloads.

In: what a transport asks of `rollout.api.RolloutEngine`. Out: parameters, to read back bit for bit. It generates
nothing and has no HTTP in between; all else that happens to weights in a worker happens as in SGLang. Must never import
sglang, megatron or torch.distributed.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch
from bench.stand_in_model import ModelSpec
from bench.worker_server import WorkerServer, connect
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.rollout.api import EngineDied, EngineError, GenerationRequest, SamplingConfig
from rlmegatron.rollout.tensor_payload import pack_for_ranks
from rlmegatron.types import Sample

_ENDS_WITHIN_MS = 10_000
State = Literal["unpublished", "updating", "failed", "serving"]


class StandInEngine:
    """Owned by the process that builds it; `server` is the address of a `WorkerServer`, None starts one of its own.

    A worker whose loader raises answers with EngineError and lives on (SGLang's would end). With the first worker that
    dies the others are ended too, and every later call raises EngineDied, until `restart`.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        tensor: int,
        dtype: torch.dtype,
        expert: int = 1,
        on_cpu: bool = False,
        device: str = "cpu",
        num_threads: int = 1,
        server: str | None = None,
    ) -> None:
        """Connects and returns at once; `wait_ready`, or the first call, waits for workers and models."""
        self.tensor = tensor
        self.version: int | None = None
        self.incarnation = 0
        self.caller = ""
        """Who updates weights: what a loader keeps in a worker by model, it keeps for each caller apart."""
        self.specs = [ModelSpec(arch, tensor, rank, dtype, on_cpu, device, expert) for rank in range(tensor)]
        self._num_threads = num_threads
        self._own_server = WorkerServer() if server is None else None
        self._address = server if self._own_server is None else self._own_server.address
        self._launch()

    def _launch(self) -> None:
        assert self._address is not None, "there is a server"
        self._links: list[Connection] = [connect(self._address) for _ in self.specs]
        self._pids: list[int] = []
        self._processes: list[int] = []  # handles, which never come to mean another process as ids may
        self._state: State = "unpublished"
        self._is_dead = False
        self.incarnation += 1

    def wait_ready(self) -> None:
        """Wait for every worker's model; raises EngineDied."""
        if self._pids or self._is_dead:
            return
        try:
            self._pids = [link.recv() for link in self._links]
            self._processes = [os.pidfd_open(pid) for pid in self._pids]
        except (EOFError, OSError):
            raise self._died(0) from None
        self._order("build", [(spec, self._num_threads) for spec in self.specs])

    @property
    def worker_pids(self) -> list[int]:
        """Process ids by rank."""
        self.wait_ready()
        return list(self._pids)

    @property
    def is_serving(self) -> bool:
        """Whether it would generate: its last update was closed and nobody died."""
        return self._state == "serving" and self.alive()

    def alive(self) -> bool:
        """Whether all workers run."""
        self.wait_ready()
        ended = select.poll()
        for process in self._processes:
            ended.register(process, select.POLLIN)
        return not self._is_dead and not ended.poll(0)

    def restart(self) -> None:
        """New workers, with garbage for weights."""
        self._end_all()
        self.version = None
        self._launch()
        self.wait_ready()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Sample]:
        """Raises EngineError: always for a stand-in, and before that for all that SGLang's refuses."""
        if not self.is_serving:
            raise EngineError(f"the engine refuses to generate: it is {'dead' if self._is_dead else self._state}")
        raise EngineError("a stand-in engine cannot generate")

    def sleep(self) -> None:
        """Needs a new publish afterwards, as the real one."""
        self._state = "unpublished"

    def wake(self, *, weights: bool = False, kv_cache: bool = False) -> None:
        """Nothing sleeps."""

    def begin_weight_update(self) -> None:
        """Open an update; a failed one is given up."""
        if self._state == "updating":
            raise EngineError("a weight update is open already; end it first")
        self._state = "failed"
        self._order("begin", [()] * self.tensor)
        self._state = "updating"

    def update_weights(self, named_tensors: Sequence[tuple[str, Any]], *, load_format: str | None = None) -> None:
        """As `SGLangEngine`; any loader that a worker can import will do."""
        self._require_open_update()
        self._state = "failed"
        payloads = pack_for_ranks(named_tensors, num_ranks=self.tensor)
        self._order("load", [(payload, load_format, self.caller) for payload in payloads])
        self._state = "updating"

    def end_weight_update(self, *, version: int) -> None:
        """Close the update and serve `version`."""
        self._require_open_update()
        self._state = "failed"
        self._order("end", [()] * self.tensor)
        self.version, self._state = version, "serving"

    def distrust_weights(self) -> None:
        """Serve nothing until a publish succeeds."""
        if self._state in ("updating", "serving"):
            self._state = "failed"

    def spoil(self) -> None:
        """Fill all weights of all ranks with garbage."""
        self._order("spoil", [()] * self.tensor)

    def parameters(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Names and copies of all parameters of a rank, one at a time."""
        for name in self._ask(rank, "names"):
            yield name, self.read(rank, name)

    def read(self, rank: int, path: str) -> Tensor:
        """A copy of one parameter, or of something derived."""
        shape, dtype = self._ask(rank, "describe", path)
        self._ask(rank, "content", path)
        content = bytearray(self._links[rank].recv_bytes())
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)

    def kill(self, rank: int) -> None:
        """End one worker as the system would, with all its threads; the engine notices by itself."""
        self.wait_ready()
        signal.pidfd_send_signal(self._processes[rank], signal.SIGKILL)
        ended = select.poll()
        ended.register(self._processes[rank], select.POLLIN)
        ended.poll(_ENDS_WITHIN_MS)

    def shutdown(self) -> None:
        """End every process; safe to call twice."""
        self._end_all()
        if self._own_server is not None:
            self._own_server.close()

    def __enter__(self) -> StandInEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _require_open_update(self) -> None:
        if self._state != "updating":
            raise EngineError(f"no weight update is open (the engine is {self._state}); call begin_weight_update first")

    def _order(self, order: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Give every rank its order and wait for all answers; the first error is raised when all have answered."""
        self._require_life()
        waiting: dict[Any, int] = {}
        for rank, (link, given) in enumerate(zip(self._links, arguments, strict=True)):
            self._send(rank, order, given)
            waiting[link] = rank
        errors = {}
        while waiting:
            for ready in wait(list(waiting)):
                rank = waiting.pop(ready)
                succeeded, value = self._receive(rank)
                if not succeeded:
                    errors[rank] = value
        if errors:
            rank = min(errors)
            raise EngineError(f"rank {rank} of the stand-in engine could not {order}:\n{errors[rank]}")

    def _ask(self, rank: int, order: str, *arguments: Any) -> Any:
        self.wait_ready()
        self._require_life()
        self._send(rank, order, arguments)
        succeeded, value = self._receive(rank)
        if not succeeded:
            raise EngineError(f"rank {rank} of the stand-in engine could not {order}:\n{value}")
        return value

    def _require_life(self) -> None:
        self.wait_ready()
        if self._is_dead:
            raise EngineDied("the stand-in engine has ended")

    def _send(self, rank: int, order: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._links[rank].send((order, arguments))
        except OSError:
            raise self._died(rank) from None

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self._links[rank].recv()
        except (EOFError, OSError):
            raise self._died(rank) from None
        return answer

    def _died(self, rank: int) -> EngineDied:
        self._end_all()
        return EngineDied(f"rank {rank} of the stand-in engine has ended")

    def _end_all(self) -> None:
        """A worker whose link is closed ends itself; one that is stopped in mid-air is ended."""
        self._is_dead = True
        for link in self._links:
            link.close()
        for process in self._processes:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)
        self._pids, self._processes, self._links = [], [], []
