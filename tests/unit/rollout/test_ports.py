"""Ports are never handed out twice, also not to processes that ask at the same moment."""

import socket
import subprocess
import sys

import pytest

from rlmegatron.rollout.ports import PortLease


def test_leases_held_together_do_not_overlap() -> None:
    leases = [PortLease(2) for _ in range(20)]
    ports = [port for lease in leases for port in lease.ports]
    assert len(set(ports)) == 40
    for lease in leases:
        lease.release()


def test_processes_that_ask_at_the_same_moment_get_different_ports() -> None:
    program = (
        "import sys\n"
        "from rlmegatron.rollout import ports\n"
        "ports._first_ephemeral_port = lambda: ports.FIRST_PORT + 60\n"  # a narrow range, so that they collide
        "lease = ports.PortLease(8)\n"
        "print(*lease.ports, flush=True)\n"
        "sys.stdin.read()\n"
    )
    asking = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    ports: list[str] = []
    for process in asking:
        assert process.stdout is not None
        ports += process.stdout.readline().split()
    for process in asking:
        process.communicate("")
    assert len(ports) == len(set(ports)) == 40


def test_a_port_in_use_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("rlmegatron.rollout.ports.FIRST_PORT", port)
        monkeypatch.setattr("rlmegatron.rollout.ports._first_ephemeral_port", lambda: port + 1)
        with pytest.raises(OSError, match="no 1 free ports on 127.0.0.1"):
            PortLease(1)


def test_a_released_port_can_be_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = PortLease(1)
    port = first.ports[0]
    first.release()
    monkeypatch.setattr("rlmegatron.rollout.ports.FIRST_PORT", port)
    monkeypatch.setattr("rlmegatron.rollout.ports._first_ephemeral_port", lambda: port + 1)
    second = PortLease(1)
    assert second.ports == (port,)
    second.release()
