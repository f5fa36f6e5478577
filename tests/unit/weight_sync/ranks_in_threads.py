"""Ranks of a job as threads of one process, for what must be in one process: real collectives among them, by torch.

In: a function of a rank's `World`. Out: what it returned on every rank. Must only be used in a process of its own: it
changes how torch.distributed keeps its groups.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

from rlmegatron.distributed.world import World

T = TypeVar("T")


def run_ranks_in_threads(
    function: Callable[[World], T], *, num_ranks: int, ranks_per_node: int, device: torch.device, timeout_s: float
) -> list[T]:
    """Raises the first failure; the other ranks end where they wait for the one that failed, or after `timeout_s`."""
    _give_each_thread_groups_of_its_own()
    ProcessLocalGroup.reset()
    store = dist.HashStore()  # type: ignore[attr-defined]
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store, timeout=timeout)
            world = World(rank, num_ranks, rank, ranks_per_node, device, dist.new_group(list(range(num_ranks))))
            results[rank] = function(world)
        except BaseException as error:  # torch ends the threads that wait with SystemExit
            failures.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    hook = sys.excepthook
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.excepthook = hook  # to which torch adds a rank for each of the groups
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(num_ranks)]


@cache
def _give_each_thread_groups_of_its_own() -> None:
    """For the rest of this process."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
