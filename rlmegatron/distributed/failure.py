"""How a job ends when something failed: one readable report, whoever noticed first, and no rank left waiting.

In: the error that ended this rank. Out: the report on stderr, once, and the exit code.
"""

from __future__ import annotations

import sys
import traceback

import torch.distributed as dist

from rlmegatron.distributed.world import RankFailure, World

FAILED = 1
INTERRUPTED = 130


def exit_code_of_failure(world: World, error: BaseException) -> int:
    """Print what happened if this rank is the one to say it.

    A `RankFailure` is the same on every rank and rank 0 says it. Any other error is this rank's own: the first rank to
    fail says it; the errors of the others, whose partner is gone, would only bury it. The process must exit now, for
    torchrun then ends the ranks that still wait in a collective.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, RankFailure):
        if world.is_lead:
            _print(str(error))
    elif _is_first(world):
        _print(f"rank {world.rank} failed:\n\n{''.join(traceback.format_exception(error)).rstrip()}")
    return FAILED


def _is_first(world: World) -> bool:
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add("rlmegatron/failures", 1) == 1)
    except Exception:
        # The store is gone with the rank or launcher that held it, so somebody failed before.
        return world.is_lead


def _print(report: str) -> None:
    line = "=" * 100
    print(f"\n{line}\n{report}\n{line}", file=sys.stderr, flush=True)
