"""Ports for the engines of one node, handed out so that engines that start at the same moment never get the same.

In: how many. Out: a `PortLease`, held by file locks until it is released or its process ends. Must never import
anything of ours.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST_PORT = 20000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortLease:
    """Loopback ports that nobody else who asks here gets while the lease is held."""

    def __init__(self, num_ports: int) -> None:
        self.ports: tuple[int, ...] = ()
        self._locks: list[int] = []
        candidates = list(range(FIRST_PORT, _first_ephemeral_port()))
        random.SystemRandom().shuffle(candidates)
        for port in candidates:
            if len(self.ports) == num_ports:
                return
            lock = _lock(port)
            if lock is not None:
                self._locks.append(lock)
                self.ports += (port,)
        if len(self.ports) < num_ports:
            self.release()
            raise OSError(f"no {num_ports} free ports on 127.0.0.1 from {FIRST_PORT} to {_first_ephemeral_port() - 1}")

    def release(self) -> None:
        """Let others have the ports."""
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()


def _first_ephemeral_port() -> int:
    # Outgoing connections take ports of the ephemeral range at any time, so a server's port must lie below it.
    if EPHEMERAL_RANGE.exists():
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
        if first > FIRST_PORT + 1000:
            return first
    return 32768


def _lock(port: int) -> int | None:
    directory = Path(tempfile.gettempdir()) / f"rlmegatron-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(directory / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError:
        os.close(lock)
        return None
    return lock
