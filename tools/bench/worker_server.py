"""A process that has imported torch and what engines' workers need, and forks a worker for everyone who connects.

In: connections to an address without a file. Out: `run_worker` at the other end of each. So a worker starts in
milliseconds, and knows nothing of its lead's process group, threads or CUDA context. The server ends with its owner,
workers with whoever connected. Must never start a thread: that would not survive the fork.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
_WAITING = 256


class WorkerServer:
    """The process; `address` may be given to other processes of the same user on this machine."""

    def __init__(self) -> None:
        """Starts it and returns at once; whoever connects early waits."""
        self.address = f"\0rlmegatron-workers-{os.getpid()}-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.address)
            listening.listen(_WAITING)
            search = [str(TOOLS), str(TOOLS.parent), *filter(None, sys.path)]
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # an interrupt at the console is its owner's to handle
            )

    def close(self) -> None:
        """End the server; workers live on until their leads hang up. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()

    def __enter__(self) -> WorkerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(address: str) -> Connection:
    """A new worker at the other end, which first sends its process id; OSError where there is no server."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(address)
    except OSError:
        link.close()
        raise
    return Connection(link.detach())


def _serve(listening: socket.socket) -> None:
    from bench.stand_in_worker import run_worker

    import rlmegatron.weight_sync.engine_worker  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: the system puts them away
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(sys.stdin, select.POLLHUP)
    while True:
        if any(descriptor != listening.fileno() for descriptor, _ in poll.poll()):
            return  # the owner has ended
        link, _ = listening.accept()
        if not _is_own_user(link) or os.fork():
            link.close()
            continue
        listening.close()
        os.close(sys.stdin.fileno())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            run_worker(Connection(link.detach()))
        finally:
            sys.stdout.flush()
            os._exit(0)


def _is_own_user(link: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(user == os.getuid())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
