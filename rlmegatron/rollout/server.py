"""One SGLang HTTP server as a child process group: start, wait until ready, look whether it lives, stop.

In: server arguments and what the process needs around them. Out: a loopback address, an API key and a log. Must never
import sglang or torch, which only the child loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmegatron.rollout.api import EngineDied, EngineError
from rlmegatron.rollout.ports import PortLease

LOG_TAIL_LINES = 30
READY_POLL_S = 0.1
# What torchrun tells its own ranks would make the engine's ranks join the wrong rendezvous.
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")
LAUNCHER_NAMES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
SHARED_MEMORY = "/dev/shm/"
LEFTOVERS = ("sglang_", "sgl_")


class EngineServer:
    """A server process that leads its own process group and ends when its owner does, however the owner ends.

    server_args: SGLang's ServerArgs by Python name; host, ports and key are added here. cores: one core list per rank,
    or none to leave placement to the system. fork_workers: start schedulers by fork (not with CUDA).
    """

    def __init__(
        self,
        *,
        server_args: Mapping[str, Any],
        environment: Mapping[str, str],
        python_path: Sequence[str],
        cores: Sequence[str],
        fork_workers: bool,
        log_path: Path,
    ) -> None:
        self.environment = dict(environment)
        """What the process finds in its environment besides this process's own."""
        self.log_path = log_path
        self.api_key = secrets.token_urlsafe(32)
        self._stopped = False
        self._ports = PortLease(2)
        self._scratch = tempfile.mkdtemp(prefix="sgl-")
        self.url = f"http://127.0.0.1:{self._ports.ports[0]}"
        order = {
            "owner_pid": os.getpid(),
            "scratch": self._scratch,
            "fork_workers": fork_workers,
            "cores": list(cores),
            "server_args": {
                **server_args,
                "host": "127.0.0.1",
                "port": self._ports.ports[0],
                "nccl_port": self._ports.ports[1],
                "api_key": self.api_key,
            },
        }
        own = {**environment, "TMPDIR": self._scratch, "PYTHONUNBUFFERED": "1"}
        self._process = self._start(json.dumps(order), child_environment(own, python_path))

    def _start(self, order: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rlmegatron.rollout.serve"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                text=True,
            )
        assert process.stdin is not None, "the child was started with a pipe"
        try:
            process.stdin.write(order)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; wait_ready says why
        return process

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group's."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether the server process runs; SGLang ends it when one of its workers dies."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests; raises EngineDied, or EngineError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if not self.alive():
                self.stop()
                raise EngineDied(self.describe(f"the engine ended while starting (exit code {self._process.poll()})"))
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError(
                    self.describe(f"the engine was not ready after {timeout_s:.0f} s (rollout.startup_timeout_s)")
                )
            time.sleep(READY_POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def describe(self, problem: str) -> str:
        """`problem` with the name of the log and its last lines."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"{problem}; log {self.log_path}, last lines:\n{tail}"

    def died(self) -> EngineDied:
        """The error that says that the process has ended."""
        return EngineDied(
            self.describe(f"the engine's process {self.pid} has ended (exit code {self._process.poll()})")
        )

    def stop(self) -> None:
        """End every process of the engine and remove what it left behind; safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        leftovers = shared_memory_of(self.pid)
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for path in leftovers:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._ports.release()


def child_environment(extra: Mapping[str, str], python_path: Sequence[str]) -> dict[str, str]:
    """This process's environment, less what torchrun tells its ranks, and `extra`; `python_path` comes first in
    PYTHONPATH, then this package."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    package_root = str(Path(__file__).parents[2])
    path = [*python_path, package_root, *inherited.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **inherited,
        **extra,
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
    }


def shared_memory_of(group: int) -> list[Path]:
    """SGLang's files in shared memory that a process of `group` has mapped, which nobody removes after a hard stop."""
    names: set[str] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text().splitlines()
                names.update(line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line)
        except OSError:
            continue  # it has just ended, or is not ours to read
    return [Path(name) for name in names if name.removeprefix(SHARED_MEMORY).startswith(LEFTOVERS)]
