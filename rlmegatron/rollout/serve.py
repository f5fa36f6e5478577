"""The program of one engine's server process: `python -m rlmegatron.rollout.serve`, started by `server.py` alone.

In: one JSON object on stdin (server arguments, so that no secret shows in a process list, and the owner's process id).
Out: SGLang's HTTP server, until its owner is gone. Must never be imported by anything that does not run an engine.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rlmegatron.platform.sglang_cpu import parse_cores
from rlmegatron.rollout.server import shared_memory_of

OWNER_POLL_S = 0.5


def main() -> None:
    """Read the order from stdin and serve; never returns while the engine is healthy."""
    order = json.load(sys.stdin)
    end_with_owner(order["owner_pid"], scratch=order["scratch"])
    keep_out_of_the_log(order["server_args"]["api_key"])
    serve(order["server_args"], fork_workers=order["fork_workers"], cores=order["cores"])


def end_with_owner(owner_pid: int, *, scratch: str) -> None:
    """Kill this process group (the engine) soon after the owner has ended, however it ended.

    The parent-death signal of Linux would be tied to the thread that started us, not to the process, hence the poll.
    """

    def watch() -> None:
        while os.getppid() == owner_pid:
            time.sleep(OWNER_POLL_S)
        for path in shared_memory_of(os.getpgid(0)):
            path.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    assert os.getpgid(0) == os.getpid(), "the engine's server must lead a process group of its own"
    threading.Thread(target=watch, name="end-with-owner", daemon=True).start()


def keep_out_of_the_log(secret: str) -> None:
    """Mask `secret` in every log record of this process; SGLang logs all of its arguments."""
    make_record = logging.getLogRecordFactory()

    def masked(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        text = record.getMessage()
        if secret in text:
            record.msg, record.args = text.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(masked)


def serve(server_args: dict[str, Any], *, fork_workers: bool, cores: Sequence[str]) -> None:
    """Launch SGLang's server with our scheduler entry; raises what SGLang raises, which ends up in the log."""
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.server_args import ServerArgs

    if fork_workers:
        _fork_instead_of_spawn(engine)
    http_server.Engine = _without_detokenizer(engine.Engine)
    scheduler = functools.partial(run_scheduler, tuple(cores))
    http_server.launch_server(ServerArgs(**server_args), run_scheduler_process_func=scheduler)


def run_scheduler(
    cores: Sequence[str], server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **named: Any
) -> None:
    """A scheduler process: SGLang's own, on its cores, with every request's sample decided by its seed."""
    if cores:
        _bind_to(parse_cores(cores[tp_rank]))
    from sglang.srt.managers.scheduler import run_scheduler_process

    from rlmegatron.rollout.expert_capture import install_expert_capture
    from rlmegatron.rollout.latent_attention import install_latent_attention
    from rlmegatron.rollout.local_experts import install_local_experts
    from rlmegatron.rollout.seeded_sampling import install_seeded_sampling

    install_seeded_sampling()
    if server_args.enable_return_routed_experts:
        install_expert_capture(on_cpu=server_args.device == "cpu")
    if server_args.device == "cpu":
        install_latent_attention()
        install_local_experts()
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **named)


def _bind_to(cores: Sequence[int]) -> None:
    # SGLang itself binds threads only in its compiled kernels.
    import torch

    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def _without_detokenizer(engine_class: Any) -> Any:
    """With token ids in and out the scheduler answers the server directly, so the idle detokenizer is not started."""

    class TokenEngine(engine_class):
        @classmethod
        def _launch_detokenizer_subprocesses(cls, *_args: Any, **_kwargs: Any) -> tuple[list[Any], list[str]]:
            return [], []

    return TokenEngine


def _fork_instead_of_spawn(engine: Any) -> None:
    """Start schedulers by fork, which spares each one the seconds that importing SGLang takes.

    Safe only without CUDA, and because the server has started neither OpenMP threads nor sockets by then.
    """
    configure = engine._set_envs_and_config

    def configure_then_fork(server_args: Any) -> None:
        configure(server_args)
        engine.mp.set_start_method("fork", force=True)

    engine._set_envs_and_config = configure_then_fork


if __name__ == "__main__":
    main()
