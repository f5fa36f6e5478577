"""What both converters answer as commands: exit codes, one report, a bar that does not flood a log.

What this does not prove: the scripts themselves and torchrun (see tests/e2e/test_converters.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from rlmegatron.distributed.world import World


def answers(*_: Any) -> list[tuple[int, str]]:
    """(exit code, standard error) of a conversion that does nothing, fails in each way, and is interrupted."""
    from rlmegatron.conversion import command

    command.dist = SimpleNamespace(destroy_process_group=lambda: None)  # type: ignore[attr-defined]  # the test needs it
    topology = command.start_topology
    command.start_topology = lambda *_, **__: None  # type: ignore[assignment]  # and starts none
    found = [code_and_text(command.run, work) for work in (nothing, mistake, mistake_on_rank_1, defect, interrupt)]
    command.start_topology = topology
    return found


def code_and_text(run: Callable[..., int], work: Callable[..., None]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        code = run("convert", work)
    return code, text.getvalue()


def nothing(world: World, *_: Any) -> None: ...


def mistake(world: World, *_: Any) -> None:
    world.lead(lambda: raising(ValueError("the/file: is bad")))


def mistake_on_rank_1(world: World, *_: Any) -> None:
    def work() -> None:
        if world.rank == 1:
            raise OSError(28, "No space left on device", "the/file")

    world.settle("the conversion", work)


def defect(world: World, *_: Any) -> None:
    world.settle("the conversion", lambda: raising(RuntimeError("unforeseen")))


def interrupt(world: World, *_: Any) -> None:
    world.barrier()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    world.settle("the conversion", lambda: signal.pause())


def raising(error: Exception) -> None:
    raise error


def test_every_end_has_its_exit_code_and_is_reported_by_the_first_rank_alone() -> None:
    first, second = run_ranks(answers, 2, timeout_s=30)
    assert [code for code, _ in first] == [code for code, _ in second] == [0, 2, 2, 1, 130]
    assert [text for _, text in second] == [""] * 5
    done, bad, full, unforeseen, stopped = (text for _, text in first)
    assert done == ""
    assert bad == "convert: the/file: is bad\n"
    assert full == "convert: the conversion failed on rank 1: OSError: [Errno 28] No space left on device: 'the/file'\n"
    assert unforeseen.startswith("convert: the conversion failed on rank 0: RuntimeError: unforeseen\n\nTraceback ")
    assert stopped == "convert: stopped; the same command goes on where it stood\n"


class Terminal(io.StringIO):
    """A text that says it is one, or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def shown(is_terminal: bool) -> str:
    """A thousand groups in 25 seconds, by a clock that is turned by hand."""
    import tqdm.std

    from rlmegatron.conversion.share import Progress

    now = [1000.0]
    tqdm.std.tqdm.monitor_interval = 0
    tqdm.std.time = lambda: now[0]  # type: ignore[attr-defined]
    sys.stderr = text = Terminal(is_terminal=is_terminal)
    world = World(dist.get_rank(), 2, 0, 2, None, None)  # type: ignore[arg-type]
    say = Progress(world)
    say.start("conversion", 1000 << 20)
    for _ in range(1000):
        now[0] += 0.025
        say.advance(1 << 20)
    say.lines(["a line"])
    say.stop()
    sys.stderr = sys.__stderr__
    return text.getvalue()


def test_a_log_gets_a_bar_every_ten_seconds_and_a_terminal_ten_a_second() -> None:
    log, nothing = run_ranks(shown, 2, False)
    terminal, _ = run_ranks(shown, 2, True)
    assert nothing == ""
    bars = [line for line in log.replace("\n", "\r").split("\r") if line.strip()]
    assert len(bars) <= 6
    assert re.fullmatch(
        r"conversion \(rank 0 of 2\):  40%\|.* \| 40[01]M/0.98G \[00:\d\d<00:1[45], 41.9MB/s\]", bars[1]
    )
    assert "a line" in log
    assert 100 < terminal.count("\r") < 400
