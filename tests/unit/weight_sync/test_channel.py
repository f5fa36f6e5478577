"""The line between a rank and its worker: in order, for the right partner alone, and over at once when one side is."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rlmegatron.weight_sync.channel import Line, LineClosed, Port, call


@pytest.fixture
def port() -> Iterator[Port]:
    found = Port()
    yield found
    found.close()


def connected(port: Port) -> tuple[Line, Line]:
    worker = call(port.address, port.token)
    return port.accept(timeout_s=5, is_alive=lambda: True), worker


def test_numbers_arrive_in_order(port: Port) -> None:
    rank, worker = connected(port)
    for number in range(3):
        rank.send(number)
    for number in range(3):
        worker.expect(number, timeout_s=5)
        worker.send(number)
        rank.expect(number, timeout_s=5)


def test_a_partner_that_ended_is_noticed_at_once(port: Port) -> None:
    rank, worker = connected(port)
    threading.Timer(0.1, worker.close).start()
    began = time.monotonic()
    with pytest.raises(LineClosed, match="has ended"):
        rank.expect(0, timeout_s=60)
    assert time.monotonic() - began < 10


def test_a_partner_that_gave_up_says_so(port: Port) -> None:
    rank, worker = connected(port)
    rank.give_up()
    with pytest.raises(LineClosed, match="given up"):
        worker.expect(0, timeout_s=60)


def test_silence_has_a_limit(port: Port) -> None:
    rank, _worker = connected(port)
    with pytest.raises(TimeoutError, match=r"no word of bucket 3 after 0.05 s"):
        rank.expect(3, timeout_s=0.05)


def test_nobody_is_told_anything_without_the_token(port: Port) -> None:
    """The stranger is hung up on, and the worker that calls after it is taken."""
    stranger = call(port.address, b"x" * len(port.token))
    rank, worker = connected(port)
    with pytest.raises(LineClosed):
        stranger.expect(0, timeout_s=5)
    rank.send(0)
    worker.expect(0, timeout_s=5)


def test_a_stranger_who_says_nothing_holds_nobody_up(port: Port) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"\0{port.address}")
        began = time.monotonic()
        connected(port)
        assert time.monotonic() - began < 5


def test_a_worker_that_died_before_it_called_is_not_waited_for(port: Port) -> None:
    with pytest.raises(LineClosed, match="worker has ended"):
        port.accept(timeout_s=60, is_alive=lambda: False)


def test_a_worker_that_never_calls_is_waited_for_so_long(port: Port) -> None:
    with pytest.raises(TimeoutError, match=r"did not call within 0.1 s"):
        port.accept(timeout_s=0.1, is_alive=lambda: True)


def test_a_rank_that_is_gone_does_not_answer() -> None:
    port = Port()
    port.close()
    with pytest.raises(LineClosed, match="does not answer"):
        call(port.address, port.token)
