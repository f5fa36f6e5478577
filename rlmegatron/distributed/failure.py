"""How a job ends when something failed: one readable report, whoever noticed first, and no rank left waiting.

In: the error that ended this rank. Out: the report on stderr, once, and the exit code.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import NoReturn

import torch.distributed as dist

from rlmegatron.distributed.launcher import SEE_REPORT, leave_note
from rlmegatron.distributed.world import RankFailure, World, describe_error

FAILED = 1
INTERRUPTED = 130
# How gloo and NCCL say that the process at the other end is gone.
_PARTNER_IS_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)


def exit_code_of_failure(world: World, error: BaseException) -> int:
    """Print what happened if this rank is the one to say it.

    A `RankFailure` is the same on every rank and rank 0 says it. Any other error is this rank's own: the first rank to
    fail says it; the errors of the others, whose partner is gone, would only bury it. The process must exit now, for
    torchrun then ends the ranks that still wait in a collective.
    """
    if isinstance(error, KeyboardInterrupt):
        if world.is_lead:
            _report("interrupted; the run goes on from its newest checkpoint when it is started again")
        return INTERRUPTED
    if isinstance(error, RankFailure):
        if world.is_lead:
            _report(str(error))
    elif _is_first(world):
        _report(_of_one_rank(world.rank, error))
    return FAILED


def end_process(code: int) -> NoReturn:
    """Exit without Python's own tear-down, which can wait for ever for a thread or for a collective that never ends."""
    for child in multiprocessing.active_children():  # Megatron's checkpoint writers would outlive this process
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _of_one_rank(rank: int, error: BaseException) -> str:
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PARTNER_IS_GONE):
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"rank {rank} lost another rank, which ended without a report: killed, out of memory, or crashed.\n"
            "torchrun lists below which rank that was, with its exit code or signal.\n"
            f"Rank {rank} noticed in {where.name} ({where.filename}:{where.lineno}): {str(error).splitlines()[0]}"
        )
    summary, trace = describe_error(error)
    return f"rank {rank} failed: {summary}" + (f"\n\n{trace.rstrip()}" if trace else "")


def _is_first(world: World) -> bool:
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add("rlmegatron/failures", 1) == 1)
    except Exception:
        # The store is gone with the rank or launcher that held it, so somebody failed before.
        return world.is_lead


def _report(text: str) -> None:
    line = "=" * 100
    print(f"\n{line}\n{text}\n{line}", file=sys.stderr, flush=True)
    leave_note(SEE_REPORT)
