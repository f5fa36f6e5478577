"""What both converters share as commands: the ranks they run on, and how a mistake is told.

In: what to do with the ranks. Out: an exit code. Must never touch a GPU.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch.distributed as dist

from rlmegatron.config.schema import ParallelConfig
from rlmegatron.conversion.share import Progress
from rlmegatron.distributed.world import RankFailure, World, start_world
from rlmegatron.learner.groups import Topology, start_topology

FAILED = 1
USER_ERROR = 2
STOPPED = 130
_M_MMAP_THRESHOLD = -3  # from malloc.h
_TIMEOUT_S = 7 * 24 * 3600.0  # a rank that is done waits for the others, however long their layers take


def run(name: str, convert: Callable[[World, Topology, Progress], None]) -> int:
    """Start the ranks that torchrun made (or one alone), convert, and print one report if that fails."""
    _return_freed_memory()
    world = start_world(timeout_s=_TIMEOUT_S)
    topology = start_topology(ParallelConfig(), seed=0, timeout_s=_TIMEOUT_S)
    say = Progress(world)
    code, report = 0, ""
    try:
        convert(world, topology, say)
    except RankFailure as failure:
        code, report = (FAILED if "Traceback" in str(failure) else USER_ERROR), str(failure)
    except KeyboardInterrupt:
        code, report = STOPPED, "stopped; the same command goes on where it stood"
    say.stop()
    if report and world.is_lead:
        print(f"{name}: {report}", file=sys.stderr)
    if code != STOPPED:
        dist.destroy_process_group()
    return code


def _return_freed_memory() -> None:
    """glibc keeps what tensors of up to 32 MB leave behind and cannot always use it again: experts of a few layers
    would add up. Where it is told a size, all that is larger goes back at once."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
