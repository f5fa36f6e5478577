"""A line between a training rank and the engine's worker on the same device: which bucket is ready, which is done.

In: short messages. Out: the same, in order; a partner that has died ends the line at once. A socket without a file,
which asks for a token and looks at the partner's user. Must import the standard library alone: both sides use it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

_TOKEN_BYTES = 32
_POLL_S = 0.2
_NUMBER = struct.Struct("<q")
_FAILED = -1


class LineClosed(OSError):
    """The partner has ended or given up."""


class Line:
    """One side of an open line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, number: int) -> None:
        """`number` of a bucket; LineClosed when nobody listens any more."""
        try:
            self._connection.sendall(_NUMBER.pack(number))
        except OSError:
            raise LineClosed("the other side has ended") from None

    def expect(self, number: int, *, timeout_s: float) -> None:
        """Wait for `number`; LineClosed when the partner ended or gave up, TimeoutError after `timeout_s`."""
        self._connection.settimeout(timeout_s)
        try:
            content = self._connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        except TimeoutError:
            raise TimeoutError(f"no word of bucket {number} after {timeout_s:g} s") from None
        except OSError:
            content = b""
        if len(content) < _NUMBER.size:
            raise LineClosed("the other side has ended")
        found = _NUMBER.unpack(content)[0]
        if found == _FAILED:
            raise LineClosed("the other side has given up")
        assert found == number, f"bucket {found} came where {number} was due"

    def give_up(self) -> None:
        """Tell the partner that no more will come."""
        with contextlib.suppress(LineClosed):
            self.send(_FAILED)

    def close(self) -> None:
        """Hang up; safe to call twice."""
        self._connection.close()


class Port:
    """Where a rank takes its worker's calls; `address` and `token` are for the worker alone."""

    def __init__(self) -> None:
        self.address = f"rlmegatron-{os.getpid()}-{secrets.token_hex(8)}"
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(4)
        self._socket.settimeout(_POLL_S)

    def accept(self, *, timeout_s: float, is_alive: Callable[[], bool]) -> Line:
        """The worker's next call; LineClosed when it is found dead, TimeoutError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                if not is_alive():
                    raise LineClosed("the engine's worker has ended") from None
                continue
            if self._knows(connection):
                return Line(connection)
            connection.close()
        raise TimeoutError(f"the engine's worker did not call within {timeout_s:g} s")

    def _knows(self, connection: socket.socket) -> bool:
        connection.settimeout(_POLL_S)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            return False
        try:
            return hmac.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), self.token)
        except OSError:
            return False

    def close(self) -> None:
        """Take no more calls."""
        self._socket.close()


def call(address: str, token: bytes) -> Line:
    """The worker's side; LineClosed when nobody is there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address}")
        connection.sendall(token)
    except OSError as error:
        connection.close()
        raise LineClosed(f"the training rank does not answer ({error.strerror})") from None
    return Line(connection)
