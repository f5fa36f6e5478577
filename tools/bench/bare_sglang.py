"""A stock SGLang engine in a process of its own, with no code of ours inside, and the handle of whoever measures it.

In: SGLang's server arguments and core lists, then batches of requests. Out: how many tokens each batch gave. The handle
imports neither torch nor sglang; the process imports nothing of rlmegatron.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class BareEngine:
    """The process; requests are sent before the clock starts and answers stay there, so only SGLang's time counts."""

    def __init__(
        self,
        *,
        server_args: Mapping[str, Any],
        cores: Sequence[Sequence[int]],
        environment: Mapping[str, str],
        log_path: Path,
    ) -> None:
        """Starts it and returns at once. cores: of each rank, or none to leave placement to the system."""
        self._log_path = log_path
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
                text=True,
            )
        self._send({"server_args": dict(server_args), "cores": [list(one) for one in cores]})

    def wait_ready(self) -> None:
        """Raises RuntimeError, with the end of the log, when the engine did not start."""
        self._receive()

    def load(self, requests: Mapping[str, Any]) -> None:
        """Hand over the arguments of the next `Engine.generate`."""
        self._send(requests)
        self._receive()

    def generate(self) -> int:
        """Run it; the number of tokens sampled."""
        self._send({})
        return int(self._receive()["num_tokens"])

    def stop(self) -> None:
        """End the process and its children; safe to call twice."""
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "the child was started with pipes"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the next answer says why

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "the child was started with pipes"
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the bare SGLang engine has ended; log {self._log_path}, last lines:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run_bound_scheduler(
    cores: Sequence[Sequence[int]],
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    *rest: Any,
    **named: Any,
) -> None:
    """SGLang's scheduler, on the cores that ours has."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    if cores:
        import torch

        os.sched_setaffinity(0, cores[tp_rank])
        torch.set_num_threads(len(cores[tp_rank]))
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **named)


def main() -> None:
    """The process: an order, then for every batch its arguments and a go, until stdin ends."""
    import functools

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints belongs in the log
    order = json.loads(sys.stdin.readline())

    from sglang.srt.entrypoints.engine import Engine

    class BoundEngine(Engine):  # type: ignore[misc, unused-ignore]
        run_scheduler_process_func = staticmethod(functools.partial(run_bound_scheduler, order["cores"]))

    engine = BoundEngine(**order["server_args"])
    engine.freeze_gc()

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(ready=True)
    while line := sys.stdin.readline():
        requests = json.loads(line)
        while not engine.flush_cache().success:  # refused while a finished request is still being put away
            time.sleep(0.05)
        answer(loaded=True)
        if not sys.stdin.readline():
            return
        outputs = engine.generate(**requests)
        answer(num_tokens=sum(len(output["output_ids"]) for output in outputs))


if __name__ == "__main__":
    main()
