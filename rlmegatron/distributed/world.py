"""The ranks of a run and how they agree: `lead` for rank 0's decisions, `settle` for phases without collectives.

In: functions to run. Out: the same value, or the same error, on every rank. Must never import megatron, sglang or any
layer above; process groups of the model belong to the learner.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_HEAD_BYTES = 256


class RankFailure(RuntimeError):
    """Raised alike on every rank when one rank failed in `lead` or `settle`; the text is the one report to print."""


@dataclass(frozen=True)
class World:
    """All ranks; `control` is a gloo group for Python objects, so control flow never touches a GPU stream."""

    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which owns files, the clock and the console."""
        return self.rank == 0

    def lead(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0 alone and return its value on every rank; its error is raised on every rank."""
        outcome: list[Any] = [None]
        if self.is_lead:
            outcome[0] = _attempt(decide)
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        value, error = outcome[0]
        if error is not None:
            raise RankFailure(error.report(rank=0, phase="lead"))
        return value  # type: ignore[no-any-return]

    def settle(self, phase: str, work: Callable[[], T]) -> T:
        """Run `work` (which must not communicate) on every rank; if any rank fails, every rank raises one report."""
        found: list[T] = []

        def keep() -> None:
            found.append(work())

        self.collect(phase, keep)
        return found[0]

    def collect(self, phase: str, work: Callable[[], T]) -> list[T]:
        """As `settle`, and the value of every rank, in rank order, on every rank."""
        outcomes = self.gather(_attempt(work))
        for rank, (_, error) in enumerate(outcomes):
            if error is not None:
                raise RankFailure(error.report(rank=rank, phase=phase))
        return [value for value, _ in outcomes]

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order, on every rank.

        Small ones travel in one collective, others in two, of which the first says how long they are.
        """
        content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        head = _padded(len(content).to_bytes(8, "little") + content, _HEAD_BYTES)
        heads = self._all_gather(head)
        sizes = [int.from_bytes(found[:8], "little") for found in heads]
        if max(sizes) + 8 > _HEAD_BYTES:
            whole = self._all_gather(_padded(content, max(sizes)))
            return [pickle.loads(found[:size]) for found, size in zip(whole, sizes, strict=True)]
        return [pickle.loads(found[8 : 8 + size]) for found, size in zip(heads, sizes, strict=True)]

    def _all_gather(self, content: torch.Tensor) -> list[bytes]:
        found = [torch.empty_like(content) for _ in range(self.size)]
        dist.all_gather(found, content, group=self.control)
        return [part.numpy().tobytes() for part in found]

    def exchange(self, outgoing: Sequence[Any]) -> list[Any]:
        """Send `outgoing[r]` to rank r and return what every rank sent here, in rank order.

        Equal objects (the same `id`) are pickled once. Bytes travel point to point, so nobody holds the whole.
        """
        assert len(outgoing) == self.size, f"exchange needs one object per rank, got {len(outgoing)} for {self.size}"
        pickled: dict[int, bytes] = {}
        for item in outgoing:
            if id(item) not in pickled:
                pickled[id(item)] = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        sizes_out = torch.tensor([len(pickled[id(item)]) for item in outgoing])
        sizes_in = torch.empty_like(sizes_out)
        dist.all_to_all_single(sizes_in, sizes_out, group=self.control)
        payload = torch.frombuffer(bytearray(b"".join(pickled[id(item)] for item in outgoing)), dtype=torch.uint8)
        received = torch.empty(int(sizes_in.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, payload, sizes_in.tolist(), sizes_out.tolist(), group=self.control)
        return [pickle.loads(part.numpy().tobytes()) for part in received.split(sizes_in.tolist())]

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.control)


def _padded(content: bytes, size: int) -> torch.Tensor:
    """[size] the first bytes, and whatever comes after them."""
    found = torch.empty(size, dtype=torch.uint8)
    part = content[:size]
    found[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return found


@dataclass(frozen=True)
class _Error:
    summary: str
    trace: str

    def report(self, *, rank: int, phase: str) -> str:
        where = "" if phase == "lead" else f"{phase} failed on rank {rank}: "
        return f"{where}{self.summary}" if not self.trace else f"{where}{self.summary}\n\n{self.trace}"


def _attempt(work: Callable[[], Any]) -> tuple[Any, _Error | None]:
    try:
        return work(), None
    except RankFailure as failure:
        return None, _Error(str(failure), "")
    except Exception as error:
        return None, _Error(*describe_error(error))


def describe_error(error: BaseException) -> tuple[str, str]:
    """A summary and a traceback; the traceback is empty for errors that say all there is to know.

    Those are a user's mistake (ValueError), the file system's (OSError), and classes with `expected = True`.
    """
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    expected = isinstance(error, (ValueError, OSError)) or getattr(error, "expected", False)
    return f"{name}{error}", "" if expected else "".join(traceback.format_exception(error))


def start_world(*, timeout_s: float) -> World:
    """Join the ranks that torchrun started (or be alone without it): NCCL where CUDA is, gloo elsewhere."""
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, alone)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(_free_port())
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        bound = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(backend, timeout=timeout, **bound)  # type: ignore[arg-type]
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
