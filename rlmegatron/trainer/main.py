"""The program of every rank of a training run: build, train, take down.

In: a `RunConfig`. Out: the exit code. Must never decide anything about training; the loop is in `online.py`.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch.distributed as dist

from rlmegatron.config.schema import RunConfig
from rlmegatron.distributed.failure import end_process, exit_code_of_failure
from rlmegatron.distributed.world import World, start_world
from rlmegatron.trainer.build import build_run
from rlmegatron.trainer.online import train


def main(cfg: RunConfig) -> int:
    """The exit code of this rank."""
    world = start_world(timeout_s=cfg.train.collective_timeout_s)
    with ExitStack() as undo:
        code = _train(cfg, world, undo)
    if code != 0:
        end_process(code)
    return code


def _train(cfg: RunConfig, world: World, undo: ExitStack) -> int:
    """The exit code; a failure is reported before anything is taken down, which could fail or hang as well."""
    try:
        train(build_run(cfg, world, undo))
        undo.callback(dist.destroy_process_group)
        return 0
    except BaseException as error:
        return exit_code_of_failure(world, error)
