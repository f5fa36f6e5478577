"""A pool of worker processes that call a reward with a time-out per answer; a worker that hangs is killed and replaced.

In: `Answer`s. Out: one `Score` or `Failure` each, in order. Must never import torch, and never forks: workers are
fresh interpreters (`worker.py`), so a caller with gloo groups, torch threads or a launch script as `__main__` is safe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from rlmegatron.rewards.api import Answer, Failure, RewardError, Score
from rlmegatron.rewards.table import Reward
from rlmegatron.rewards.worker import Hello

START_TIMEOUT_S = 120.0
CHUNK_WORK_S = 0.005
MAX_CHUNK = 64
_POLL_S = 0.2


class Worker:
    """One worker process; it starts at the first use and again after a kill."""

    def __init__(self, reward: Reward, *, timeout_s: float) -> None:
        self._hello = Hello(reward.name, dict(reward.args), timeout_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def judge(self, answers: Sequence[Answer], halt: threading.Event) -> Iterator[Score | Failure]:
        """Outcomes in order; ends early after the first answer that hung or killed the process, or when halted."""
        connection = self._start()
        pending = True
        try:
            connection.send(list(answers))
            for _ in answers:
                outcome = self._receive(connection, halt, timeout_s=self._hello.timeout_s)
                if outcome is None:
                    return
                yield outcome
            pending = False
        except (EOFError, BrokenPipeError, ConnectionResetError):
            yield Failure(f"the reward's process ended ({self._exit_reason()})")
        except TimeoutError:
            yield Failure(f"timed out after {self._hello.timeout_s:g} s")
        finally:
            if pending:
                self.kill()

    def kill(self) -> None:
        """End the process and all that it started (SIGKILL to its process group); the next use starts a new one."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection = self._process = None

    def _start(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlmegatron.rewards.worker", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection = connection = Connection(ours.detach())
        try:
            connection.send(self._hello)
            greeting = connection.recv() if connection.poll(START_TIMEOUT_S) else "no sign of life"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            greeting = f"its process ended ({self._exit_reason()})"
        if greeting != "ready":
            self.kill()
            raise RewardError(f"reward {self._hello.name} could not start in its worker process: {greeting}")
        return connection

    def _receive(self, connection: Connection, halt: threading.Event, *, timeout_s: float) -> Score | Failure | None:
        """The next outcome, None when halted; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not connection.poll(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            if halt.is_set():
                return None
            if time.monotonic() >= deadline:
                raise TimeoutError
        outcome = connection.recv()
        assert isinstance(outcome, Score | Failure), f"a reward worker sent {outcome!r}"
        return outcome

    def _exit_reason(self) -> str:
        assert self._process is not None, "the worker was never started"
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class WorkerPool:
    """`num_workers` workers, each fed by a thread of the caller."""

    def __init__(self, reward: Reward, *, num_workers: int, timeout_s: float) -> None:
        self._workers = [Worker(reward, timeout_s=timeout_s) for _ in range(num_workers)]

    def judge(self, answers: Sequence[Answer], *, stop_at_failure: bool) -> list[Score | Failure | None]:
        """One outcome per answer, in order; None only for answers left out after a failure with `stop_at_failure`.

        Raises RewardError if a worker cannot start.
        """
        outcomes: list[Score | Failure | None] = [None] * len(answers)
        todo = deque(range(len(answers)))
        halt = threading.Event()
        workers = self._workers[: len(answers)]
        with ThreadPoolExecutor(max(1, len(workers)), thread_name_prefix="reward") as threads:
            try:
                feeds = [
                    threads.submit(self._feed, worker, answers, todo, outcomes, halt, stop_at_failure)
                    for worker in workers
                ]
                for feed in feeds:
                    feed.result()
            finally:
                halt.set()
        return outcomes

    def close(self) -> None:
        """End every worker; safe to call twice."""
        for worker in self._workers:
            worker.kill()

    def _feed(
        self,
        worker: Worker,
        answers: Sequence[Answer],
        todo: deque[int],
        outcomes: list[Score | Failure | None],
        halt: threading.Event,
        stop_at_failure: bool,
    ) -> None:
        """Give `worker` answers until none is left: one at a time, or more at once while they take microseconds."""
        size = 1
        try:
            while not halt.is_set():
                chunk = self._take(todo, size)
                if not chunk:
                    return
                began, num_done = time.monotonic(), 0
                for outcome in worker.judge([answers[index] for index in chunk], halt):
                    outcomes[chunk[num_done]] = outcome
                    num_done += 1
                    if stop_at_failure and isinstance(outcome, Failure):
                        halt.set()
                todo.extendleft(reversed(chunk[num_done:]))
                mean_s = (time.monotonic() - began) / max(1, num_done)
                size = max(1, min(MAX_CHUNK, int(CHUNK_WORK_S / mean_s)))
        except BaseException:
            halt.set()
            raise

    def _take(self, todo: deque[int], size: int) -> list[int]:
        """Up to `size` answers, but never more than a fair share of what is left."""
        share = -(-len(todo) // len(self._workers))
        chunk: list[int] = []
        while len(chunk) < min(size, share):
            try:
                chunk.append(todo.popleft())
            except IndexError:
                break
        return chunk
