"""Runs one function on several gloo ranks: forked from a preloaded server, collected, and always ended.

In: a module-level function, a number of ranks and picklable arguments. Out: what each rank returned, or one
`RanksFailed` with every rank's traceback. The function finds the default process group ready.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GRACE_S = 3.0  # once one rank has failed, the others have this long to say that they failed too


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not answer in time."""


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """`[function(*args) of each rank]`; no process is left behind, whatever happens."""
    context = _context()
    with tempfile.TemporaryDirectory() as directory:
        processes, answers = [], []
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (sender, f"{directory}/store", rank, num_ranks, timeout_s, function, args)
                process = context.Process(target=_rank_main, args=arguments)
                process.start()
                sender.close()
                processes.append(process)
                answers.append(receiver)
            return _collect(answers, timeout_s)
        finally:
            for process in processes:
                _end(process)


def _end(process: Any) -> None:
    """The rank leads a process group of its own, which also holds what it started (Megatron's checkpoint writers)."""
    process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _collect(answers: list[Connection], timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_ends = {answer: rank for rank, answer in enumerate(answers)}
    deadline = time.monotonic() + timeout_s
    while open_ends and (remaining := deadline - time.monotonic()) > 0:
        for answer in wait(list(open_ends), timeout=remaining):
            rank = open_ends.pop(answer)  # type: ignore[call-overload]
            try:
                succeeded, content = pickle.loads(answer.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                succeeded, content = False, "the process died"
            (values if succeeded else errors)[rank] = content
        if errors:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if not errors and not open_ends:
        return [values[rank] for rank in range(len(answers))]
    silent = "was still waiting" if errors else f"no answer within {timeout_s:g} s"
    errors |= dict.fromkeys(open_ends.values(), silent)
    raise RanksFailed("\n".join(f"--- rank {rank}: {errors[rank]}" for rank in sorted(errors)))


def _rank_main(
    sender: Connection, store: str, rank: int, size: int, timeout_s: float, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    try:
        torch.set_num_threads(1)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=limit)
        answer = (True, function(*args))
        dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may still wait for a rank that failed


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    with _server_environment():
        context.set_forkserver_preload(["rank_preload"])
        multiprocessing.forkserver.ensure_running()
    return context


@contextmanager
def _server_environment() -> Iterator[None]:
    """Only the server and its forks see this; a server that runs already keeps its own."""
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, sys.path)]
    changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
