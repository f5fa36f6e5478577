"""What both converters share as commands: the ranks they run on, and how a mistake is told.

In: what to do with the ranks. Out: an exit code (0 done, 1 failed, 2 the user's mistake). Must never touch a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch.distributed as dist

from rlmegatron.config.schema import ParallelConfig
from rlmegatron.conversion.share import Progress
from rlmegatron.distributed.world import RankFailure, World, start_world
from rlmegatron.learner.groups import Topology, start_topology

USER_ERROR = 2
_TIMEOUT_S = 7 * 24 * 3600.0  # a rank that is done waits for the others, however long their layers take


def run(name: str, convert: Callable[[World, Topology, Progress], None]) -> int:
    """Start the ranks that torchrun made (or one alone), convert, and print one report if that fails."""
    world = start_world(timeout_s=_TIMEOUT_S)
    topology = start_topology(ParallelConfig(), seed=0, timeout_s=_TIMEOUT_S)
    say = Progress(world)
    code = 0
    try:
        convert(world, topology, say)
    except RankFailure as failure:
        say.stop()
        if world.is_lead:
            print(f"{name}: {failure}", file=sys.stderr)
        code = 1 if "Traceback" in str(failure) else USER_ERROR
    finally:
        say.stop()
    dist.destroy_process_group()
    return code
