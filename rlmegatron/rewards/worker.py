"""The process in which rewards that may hang or crash are called: `python -P -m rlmegatron.rewards.worker FD`.

In: over the socket FD, first the reward's name and arguments, then lists of `Answer`s. Out: "ready" or what went wrong,
then one `Score` or `Failure` per answer, each as soon as it is known. Must never import torch.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlmegatron.rewards.api import Answer, Failure, Score, as_score
from rlmegatron.rewards.signature import Scalar
from rlmegatron.rewards.table import Reward, resolve

ORPHAN_GRACE_S = 60.0
_FRAMES_SHOWN = 6
_OUR_DIRECTORY = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, slots=True)
class Hello:
    """First message to a worker."""

    name: str
    args: Mapping[str, Scalar]
    timeout_s: float


def evaluate(reward: Reward, answer: Answer, runner: asyncio.Runner | None = None) -> Score | Failure:
    """The judgement of one answer; whatever the reward raises becomes a `Failure`. Coroutines run on `runner`."""
    try:
        value = reward(answer)
        if inspect.iscoroutine(value):
            assert runner is not None, f"{reward.name} is asynchronous and was called without an event loop"
            value = runner.run(value)
        return as_score(value)
    except (Exception, SystemExit) as error:
        return Failure(f"{type(error).__name__}: {error}\n{_users_frames(error)}".rstrip())


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes the connection."""
    hello: Hello = connection.recv()
    try:
        reward = resolve(hello.name, hello.args)
    except Exception as error:
        connection.send(str(error))
        return
    connection.send("ready")
    with asyncio.Runner() as runner:
        while True:
            try:
                answers: list[Answer] = connection.recv()
            except EOFError:
                return
            # A watchdog that needs no GIL: if the judging process is gone, nobody else ends a reward that hangs.
            faulthandler.dump_traceback_later(hello.timeout_s * len(answers) + ORPHAN_GRACE_S, exit=True)
            for answer in answers:
                connection.send(evaluate(reward, answer, runner))
            faulthandler.cancel_dump_traceback_later()


def _users_frames(error: BaseException) -> str:
    """Where in the user's code the error was raised; nothing if a verifier of ours found the input wrong."""
    frames = traceback.extract_tb(error.__traceback__)
    while frames and os.path.dirname(frames[0].filename) == _OUR_DIRECTORY:
        del frames[0]
    if not frames or os.path.dirname(frames[-1].filename) == _OUR_DIRECTORY:
        return ""
    return "".join(traceback.format_list(frames[-_FRAMES_SHOWN:]))


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)
