"""Run the quickstart's presets over several seeds, one after the other, and compare them in one table.

In: names of presets and seeds. Out: a run directory and a log for each, results.json and table.md. Every run is
`launch/quickstart.sh`, as a user would start it; must never train itself nor import torch.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quickstart.report import read_rows
from quickstart.results import Result, keep, read_result, recall, write_results
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "yaml_configs"
STAMP = "sweep.json"
SECONDS = re.compile(r"^quickstart: accuracy .* steps, (\d+) s, run ", re.MULTILINE)
"""The last line of launch/quickstart.sh, from which the seconds of the training job are read."""
OVERRIDE = re.compile(r"[a-z][a-z_.0-9]*=")
ENDS_WITHIN_S = 30.0
POLL_S = 0.5

EPILOG = """\
  section.key=value     settings of every run, on top of its preset

what it does:
  Runs `bash launch/quickstart.sh PRESET --seed N run_dir=OUT/PRESET_seedN`, which makes the environment and the
  half-trained start where they are missing. A run takes one to two minutes on two cores, the whole sweep an hour.
  A finished run is not repeated while its preset and overrides are the same. Stop the sweep with Ctrl-C and start it
  again with the same command: it begins with the run that was interrupted, from its first step. Runs that are replaced
  are moved aside (OUT/PRESET_seedN.1, .2, ...), never deleted. A run that fails is reported, and the others go on.

what it leaves in OUT:
  PRESET_seedN/       the run directory, as launch/train.py writes it, with its result in sweep.json
  PRESET_seedN.log    what the run printed
  results.json        a record for each finished run
  table.md            the table that is printed at the end, one row for each preset, one number for each seed

examples:
  python tools/sweep_quickstart.py
  python tools/sweep_quickstart.py --presets grpo gspo cispo --seeds 1
  python tools/sweep_quickstart.py --presets gspo --out runs/wide_clip algorithm.clip_low=0.01 algorithm.clip_high=0.01
  python tools/sweep_quickstart.py --table

exit codes:
  0    every run is finished
  1    a run failed
  2    the command line is wrong; nothing was started
  130  interrupted
"""

Poll = Callable[[], None]
Runner = Callable[[Sequence[str], Path, Poll], int]
"""(command, log file, called now and then) -> exit code."""


@dataclass(frozen=True)
class Job:
    """One run of the sweep."""

    preset: str
    seed: int
    out: Path
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people."""
        return f"{self.preset} seed {self.seed}"

    @property
    def name(self) -> str:
        """Name of its directory in `out`."""
        return f"{self.preset}_seed{self.seed}"

    @property
    def run(self) -> Path:
        """Its run directory."""
        return self.out / self.name

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.out / f"{self.name}.log"

    @property
    def command(self) -> list[str]:
        """How it is started."""
        seed = ["--seed", str(self.seed)]
        script = str(ROOT / "launch" / "quickstart.sh")
        return ["bash", script, self.preset, *seed, *self.overrides, f"run_dir={self.run.resolve()}"]

    @property
    def settings(self) -> dict[str, Any]:
        """What a finished run must have had in order to stand for this one."""
        preset = hashlib.sha256(preset_file(self.preset).read_bytes()).hexdigest()
        return {"preset_sha256": preset, "overrides": list(self.overrides)}

    def finished(self) -> Result | None:
        """Its result, where it was run to the end with these settings."""
        return recall(self.run / STAMP, settings=self.settings)


def main(argv: Sequence[str] | None = None, runner: Runner | None = None) -> int:
    """Run what is missing, or only show what is there; returns the exit code."""
    given = parse(argv)
    console = Console(soft_wrap=True, highlight=False)
    if given.table:
        return show(given.out, console)
    jobs = [Job(name, seed, given.out, tuple(given.overrides)) for name in given.presets for seed in given.seeds]
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # so that what was started is ended
    try:
        failed = sweep(jobs, console, runner or run_logged)
    except KeyboardInterrupt:
        console.print("sweep: interrupted; the same command goes on with the run that was stopped")
        return 130
    show(given.out, console)
    for job, reason in failed:
        console.print(f"sweep: {job} failed: {reason}; see {job.log}", style="red")
    return 1 if failed else 0


def sweep(jobs: Sequence[Job], console: Console, runner: Runner) -> list[tuple[Job, str]]:
    """Run every job that is not finished; returns those that failed, each with the reason."""
    failed: list[tuple[Job, str]] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            result = job.finished()
            if result is not None:
                console.print(f"{result.line} (there already)")
            else:
                outcome = attempt(job, runner, partial(_show_step, progress, task, job))
                if isinstance(outcome, Result):
                    console.print(outcome.line)
                else:
                    console.print(f"{job}: failed: {outcome}", style="red")
                    failed.append((job, outcome))
            progress.advance(task)
    return failed


def attempt(job: Job, runner: Runner, poll: Poll) -> Result | str:
    """Run one job; returns its result, or why there is none."""
    code = runner(job.command, job.log, poll)
    if code != 0:
        return f"exit code {code}"
    line = SECONDS.search(job.log.read_text(errors="replace"))
    if line is None:
        return "it printed no result line"
    try:
        result = read_result(job.run, preset=job.preset, seed=job.seed, seconds=float(line[1]))
    except ValueError as error:
        return str(error)
    keep(job.run / STAMP, settings=job.settings, result=result)
    write_results(job.out, kept_results(job.out))
    return result


def run_logged(command: Sequence[str], log: Path, poll: Poll) -> int:
    """Run `command` with its output in `log`; ends whatever it started when this process is told to end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while True:
            poll()
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=POLL_S)
    except BaseException:
        _end_group(process)
        raise


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the process and its descendants to end, then make them."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()  # a child that nobody waits for keeps its group alive
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show_step(progress: Progress, task: TaskID, job: Job) -> None:
    step = 0
    with suppress(ValueError, IndexError):  # no file, an unfinished line, nothing in it
        step = read_rows(job.run)[-1]["step"]
    progress.update(task, description=f"{job}, step {step}")


def show(out: Path, console: Console) -> int:
    """Print the table of what is in `out`; returns the exit code."""
    results = kept_results(out)
    if not results:
        console.print(f"sweep: no finished run in {out}")
        return 0
    console.print(write_results(out, results), end="", markup=False)
    return 0


def kept_results(out: Path) -> list[Result]:
    """Results of the runs in `out` that were not moved aside, by preset and seed."""
    found = (recall(path) for path in out.glob(f"*_seed*/{STAMP}") if re.search(r"_seed\d+$", path.parent.name))
    order = {name: number for number, name in enumerate(presets())}
    results = [result for result in found if result is not None]
    return sorted(results, key=lambda result: (order.get(result.preset, len(order)), result.preset, result.seed))


def presets() -> list[str]:
    """Names of all presets."""
    return sorted(path.stem.removeprefix("quickstart_") for path in CONFIGS.glob("quickstart_*.yaml"))


def preset_file(preset: str) -> Path:
    """The configuration of a preset."""
    return CONFIGS / f"quickstart_{preset}.yaml"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(
        prog="tools/sweep_quickstart.py",
        usage="%(prog)s [-h] [--presets PRESET ...] [--seeds N ...] [--out DIR] [--table] [section.key=value ...]",
        description="Run the quickstart's presets over several seeds and compare them in one table.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    known = presets()
    parser.add_argument("--presets", nargs="+", choices=known, default=known, metavar="PRESET", help=_help(known))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), metavar="DIR", help="default: runs/sweep")
    parser.add_argument("--table", action="store_true", help="print the table of what is in DIR, start nothing")
    words = list(sys.argv[1:] if argv is None else argv)
    # Taken out first: --presets and --seeds would swallow those behind them.
    overrides = [word for word in words if OVERRIDE.match(word)]
    given = parser.parse_args(
        [word for word in words if word not in overrides], argparse.Namespace(overrides=overrides)
    )
    if any(seed < 0 for seed in given.seeds):
        parser.error("--seeds: a seed is a whole number of at least 0")
    if given.table and not given.out.is_dir():
        parser.error(f"--out: {given.out} is no directory; give one that a sweep has left runs in")
    if not given.table:
        try:
            given.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: cannot make {given.out}: {error.strerror}")
    given.presets, given.seeds = _distinct(given.presets), _distinct(given.seeds)
    return given


def _help(known: Iterable[str]) -> str:
    return f"default: all, which are {', '.join(known)}"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    sys.exit(main())
