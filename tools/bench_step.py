"""Benchmark a configuration: where a step's time goes, and our rollout and update beside bare SGLang and bare Megatron.

In: a config file, as for training. Out: tables on the console and, if asked, a JSON file. Trains for a few steps in a
directory of its own, with the config's own settings; must never write into the run's directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.launch import become_torchrun
from bench.measure import Comparison, Phase, alternate, phases
from bench.report import as_data, comparison_table, phase_table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rlmegatron.cli import count_of
from rlmegatron.config.load import ConfigError, load
from rlmegatron.preflight import examine

if TYPE_CHECKING:
    from bench.bare_sglang import BareEngine

    from rlmegatron.config.schema import RunConfig
    from rlmegatron.distributed.world import World
    from rlmegatron.trainer.run import Run

EPILOG = """\
what is measured:
  phases   the loop of launch/train.py for --steps steps after one that warms up
  rollout  our way from prompts to samples, beside one plain HTTP call to the same SGLang server with the same requests,
           and beside sglang.Engine in a process of its own (same settings, weights and cores, nothing of ours in it;
           see --bare-engine)
  update   our actor update, beside a bare Megatron-Core loop on the same model, optimizer and packed micro-batches with
           a plain policy-gradient loss
  The sides of a comparison alternate (ours, bare, bare, ours, ...) in one run, so that other work on the machine shifts
  both; the ratio is the median over rounds, with its quartiles. More --rounds narrow it.

examples:
  python tools/bench_step.py --config yaml_configs/quickstart_grpo.yaml --ranks 2
  python tools/bench_step.py --config my.yaml --ranks 8 --rounds 20 --json bench.json rollout.max_new_tokens=256
  torchrun --nnodes 2 --nproc-per-node 8 ... tools/bench_step.py --config my.yaml --run-dir /shared/bench
  Settings after the options override the file, as in launch/train.py.

exit codes:
  0  done
  1  the benchmark failed, or a ratio is below --fail-below
  2  the configuration or the command line is wrong; nothing was started
"""
LOG_WIDTH = 120
OVERRIDES = (
    "eval.sets={}",
    "eval.every=0",
    "checkpoint.every=0",
    "checkpoint.export=false",
    "logging.tensorboard=false",
    "logging.wandb_project=null",
    "logging.mlflow_uri=null",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them; returns the exit code."""
    given = parse(argv)
    started = "WORLD_SIZE" in os.environ
    try:
        num_ranks = int(os.environ["WORLD_SIZE"]) if started else given.ranks
        examine(given.config, overrides(given), world_size=(num_ranks, "from --ranks"))
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            problems = "\n".join(f"  {problem}" for problem in error.problems)
            print(f"{given.config}: nothing was started\n{problems}", file=sys.stderr)
        return 2
    if not started and num_ranks > 1:
        become_torchrun(__file__, argv, num_ranks=num_ranks)
    return run_rank(given)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(
        description="Where a training step's time goes, and how far our parts are from the bare libraries.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file of the run")
    parser.add_argument(
        "--ranks", type=count_of, default=1, metavar="N", help="ranks to start on this machine (default 1)"
    )
    parser.add_argument("--steps", type=count_of, default=5, metavar="N", help="measured training steps (default 5)")
    parser.add_argument("--rounds", type=count_of, default=8, metavar="N", help="rounds per comparison (default 8)")
    parser.add_argument(
        "--bare-engine",
        action=argparse.BooleanOptionalAction,
        help="also start sglang.Engine beside our engine; the device must hold both (default: only without a GPU)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, with every round, to this file")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="keep logs and metrics here (default: a temporary directory, removed at the end)",
    )
    parser.add_argument(
        "--fail-below", type=float, metavar="RATIO", help="exit with 1 when a median ratio is below this, such as 0.9"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings on top of the file")
    given = parser.parse_intermixed_args(argv)
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no directory {given.json.absolute().parent}")
    return given


def overrides(given: argparse.Namespace) -> list[str]:
    """The config's settings, then the user's, then what a benchmark must not do."""
    return [*given.overrides, *OVERRIDES, f"train.steps={given.steps + 1}"]


def run_rank(given: argparse.Namespace) -> int:
    """The program of every rank."""
    from rlmegatron.distributed.failure import exit_code_of_failure
    from rlmegatron.distributed.world import start_world

    for category in (FutureWarning, UserWarning):  # Megatron's and torch's about themselves, once per rank
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch")
    cfg = load(given.config, overrides(given))
    world = start_world(timeout_s=cfg.train.collective_timeout_s)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-step-") as scratch:
            directory = world.lead(lambda: given.run_dir or scratch)
            cfg = load(given.config, [*overrides(given), f"run_dir={json.dumps(directory)}"])
            return measure(given, cfg, world)
    except BaseException as error:
        return exit_code_of_failure(world, error)


def measure(given: argparse.Namespace, cfg: RunConfig, world: World) -> int:
    """All measurements in one run; rank 0 reports."""
    from rlmegatron.trainer.build import running
    from rlmegatron.trainer.online import train

    console = Console(highlight=False, quiet=not world.is_lead)
    if not console.is_terminal:
        console = Console(highlight=False, quiet=not world.is_lead, width=LOG_WIDTH)
    with running(cfg, world) as run:
        console.print(f"phases: {given.steps + 1} steps of the loop")
        train(run)
        found = world.lead(lambda: _phases_of(Path(cfg.directory)))
        comparisons = _compare(given, run, console)
    if not world.is_lead:
        return 0
    console.print(phase_table(found, num_steps=given.steps), comparison_table(comparisons))
    if given.json is not None:
        data = as_data(found, comparisons, _facts(given, cfg, world))
        given.json.write_text(json.dumps(data, indent=2) + "\n")
    below = given.fail_below is not None and any(one.ratio.median < given.fail_below for one in comparisons)
    return 1 if below else 0


def _compare(given: argparse.Namespace, run: Run, console: Console) -> list[Comparison]:
    """The comparisons on a trained run, whose learner holds the device."""
    from bench.rollout_pair import OneCall, Rounds, start_stock_engine
    from bench.update_pair import Updates, answers_to, scored_batch

    from rlmegatron.trainer.hand_over import hand_device_to_engine, hand_device_to_learner, publish_weights
    from rlmegatron.trainer.state import export_policy

    world, engine = run.world, run.rollout.engine
    with_engine = given.bare_engine if given.bare_engine is not None else world.device.type == "cpu"
    weights = export_policy(run) if with_engine else None
    publish_weights(run, version=given.steps + 1)
    hand_device_to_engine(run)
    with _progress(console) as progress:
        rounds = Rounds(run, OneCall(engine.server) if engine is not None else None)
        comparisons = [_pair(given, progress, "rollout", "SGLang, one HTTP call", rounds)]
        if weights is not None:
            log_path = run.directory.resolve() / "logs" / f"stock_engine_{world.rank:03d}.log"
            stock = start_stock_engine(run, weights=weights.resolve(), cores=_cores(run), log_path=log_path)
            try:
                task = progress.add_task("starting sglang.Engine", total=1)
                world.settle("bare engine", _ready(stock))
                progress.update(task, completed=1)
                comparisons.append(_pair(given, progress, "rollout", "sglang.Engine", Rounds(run, stock)))
            finally:
                if stock is not None:
                    stock.stop()
        groups = answers_to(run, world.lead(lambda: run.prompts.take(run.cfg.rollout.prompts_per_step)))  # type: ignore[union-attr]
        hand_device_to_learner(run)
        updates = Updates(run, scored_batch(run, groups))
        comparisons.append(_pair(given, progress, "update", "Megatron-Core loop", updates))
    return comparisons


def _ready(stock: BareEngine | None) -> Callable[[], None]:
    return stock.wait_ready if stock is not None else lambda: None


def _pair(given: argparse.Namespace, progress: Progress, name: str, baseline: str, sides: Any) -> Comparison:
    task = progress.add_task(f"{name} beside {baseline}", total=given.rounds + 1)
    advance: Callable[[], None] = lambda: progress.advance(task)  # noqa: E731
    return Comparison(name, baseline, alternate(sides.ours, sides.bare, num_rounds=given.rounds, on_round=advance))


def _progress(console: Console) -> Progress:
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *bar, console=console, disable=console.quiet)


def _cores(run: Run) -> tuple[str, ...]:
    """The cores of this rank's engine, as the run shares them out."""
    from rlmegatron.rollout.placement import engine_cores, engine_of

    placement = engine_of(run.world.rank, run.rollout.engines)
    return engine_cores(placement, sorted(os.sched_getaffinity(0)), ranks_per_node=run.world.ranks_per_node)


def _phases_of(directory: Path) -> list[Phase]:
    """From the metrics that the loop wrote, without the step that warms up."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return phases([line for line in lines if "time/step" in line][1:])


def _facts(given: argparse.Namespace, cfg: RunConfig, world: World) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    return {
        "config": given.config,
        "overrides": given.overrides,
        "ranks": world.size,
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "sglang")},
        "model": cfg.model.path,
        "steps": given.steps,
    }


if __name__ == "__main__":
    sys.exit(main())
