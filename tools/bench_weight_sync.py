"""Benchmark the weight sync: every transport beside megatron-core's resharding, on the same made-up weights.

In: a family, a size and a layout. Out: a table on the console and, if asked, a JSON file. Runs on gloo ranks with
stand-in engines; needs no weights, no SGLang and no GPU, and writes nothing but that file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argument_types import above_zero
from bench.launch import become_torchrun
from bench.sync_layout import SyncLayout, parse_layout
from rich.console import Console

from rlmegatron.cli import count_of
from rlmegatron.config.estimate import NUM_BYTES

if TYPE_CHECKING:
    from bench.sync_report import Report
    from bench.sync_scene import Scene

    from rlmegatron.distributed.world import World

EPILOG = """\
layouts:
  LEARNER->ENGINE, each a list of sizes; what is not named is 1. A learner has tp (tensor), pp (pipeline), vpp (virtual
  pipeline), ep (expert) and etp (expert tensor), an engine tp and ep. Ranks beyond one learner are data parallelism.
    tp8pp1->tp2   tp4->tp1   tp2->tp4   tp2pp2vpp2->tp1   tp2ep2->tp2   ep4->tp2   tp2ep2etp1->tp2ep2
  Engines lie over the ranks as in training, so that a rank's own shard is part of what its engine rank holds.

transports:
  peer        engine workers read the training ranks' memory and write their own
  collective  training ranks gather buckets, engine workers scatter them
  hf_stream   whole Hugging Face tensors, placed by the engine's loader; the others are compared with it
  megatron    megatron.core.resharding with its gloo copy service, into Megatron's own layout on the training ranks,
              cut as the engines are: dense models alone. Its plan is cached after its first call

how it measures:
  Every rank has its shard in one contiguous buffer. An engine is one worker process per rank, with SGLang's parameters
  and SGLang's way to hand tensors to a loader; HTTP is not in it. Transports take their first call one after the other,
  then all in turn, forwards and backwards, for --rounds rounds. A call is timed from a barrier to a barrier.
    first call      everything included that a transport does once, such as its plan
    later calls     median over the rounds, with quartiles; the ratio is taken round by round
    received        bytes that came to a rank, or to its engine worker, from other ranks, counted; of the rank that got
                    most. "over bound" is that beside what no way can avoid, (1/engine ranks - 1/learner ranks) of all
    extra memory    the most that a rank and its engine worker held together beyond the model on either side: what the
                    first call left, and the peak of a later one. Proportional set size, looked at every 5 ms in a call
                    of its own
    messages        collectives, sends and receives of a rank; of peer: buffers of other ranks that a worker reads
    bits            with --check, every destination was filled with garbage and the weights were changed before a call,
                    after which each element was found equal to the learner's
  On a machine with a GPU the transports run on its CPU all the same, and the kernel that copies segments is measured on
  the GPU, beside a plain copy of as many bytes.

examples:
  torchrun --nproc-per-node 8 tools/bench_weight_sync.py --gb 1 --layout 'tp8pp1->tp2' --check
  python tools/bench_weight_sync.py --family qwen3_moe --gb 0.2 --layout 'tp2ep2->tp2ep2'
  python tools/bench_weight_sync.py --gb 0.5 --engine-dtype bf16 --transports peer,hf_stream --json out.json
  Without torchrun it starts as many ranks itself as the layout needs, or --ranks. Memory: --gb for the learner, as much
  for every engine and for every engine's worth of megatron's target, and twice that again while megatron copies.

exit codes:
  0  done
  1  the benchmark failed, or --check found a difference
  2  the command line is wrong; nothing was started
"""
LOG_WIDTH = 160
TRANSPORTS = ("peer", "collective", "hf_stream", "megatron")


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them; returns the exit code."""
    given = parse(argv)
    if "WORLD_SIZE" in os.environ or given.ranks == 1:
        return run_rank(given)
    become_torchrun(__file__, argv, num_ranks=given.ranks)


class _Parser(argparse.ArgumentParser):
    """Speaks once, not once on every rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        super().error(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments; `layout` is a `SyncLayout` afterwards and `transports` a tuple."""
    from bench.synthetic_model import refuse_misfit

    parser = _Parser(
        description="How fast, with how many bytes and in how much memory weights get from a learner into engines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--family", default="qwen3", metavar="NAME", help="model family, as qwen3_moe (default qwen3)")
    parser.add_argument("--gb", type=above_zero, default=0.1, metavar="GB", help="size of the model (default 0.1)")
    parser.add_argument("--dtype", choices=NUM_BYTES, default="fp32", help="of the learner's weights (default fp32)")
    parser.add_argument("--engine-dtype", choices=NUM_BYTES, help="of the engines' weights (default: as the learner's)")
    parser.add_argument("--layout", default="tp8pp1->tp2", metavar="A->B", help="see below (default tp8pp1->tp2)")
    parser.add_argument("--ranks", type=count_of, metavar="N", help="ranks, without torchrun (default: the fewest)")
    parser.add_argument("--rounds", type=count_of, default=5, metavar="N", help="timed calls of each (default 5)")
    parser.add_argument(
        "--transports", default=",".join(TRANSPORTS), metavar="A,B", help="which, in which order (default: all)"
    )
    parser.add_argument("--bucket-mb", type=above_zero, default=512, metavar="MB", help="of a bucket (default 512)")
    parser.add_argument("--check", action="store_true", help="compare every destination bit for bit, once")
    parser.add_argument("--timeout", type=above_zero, default=300, metavar="S", help="of a collective (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, with every round, to this file")
    given = parser.parse_args(argv)
    started = os.environ.get("WORLD_SIZE")
    try:
        given.layout = parse_layout(given.layout, num_ranks=int(started) if started else given.ranks)
        given.transports = _transports(given.transports)
        refuse_misfit(_architecture(given), given.layout)
    except ValueError as error:
        parser.error(str(error))
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no directory {given.json.absolute().parent}")
    given.ranks = given.layout.num_ranks
    given.engine_dtype = given.engine_dtype or given.dtype
    return given


def run_rank(given: argparse.Namespace) -> int:
    """The program of every rank."""
    import torch.distributed as dist
    from bench.sync_scene import gloo_world

    from rlmegatron.distributed.failure import end_process, exit_code_of_failure

    for category in (FutureWarning, UserWarning):  # Megatron's and torch's about themselves, once per rank
        warnings.filterwarnings("ignore", category=category, module=r"megatron|torch")
    with ExitStack() as undo:
        world = gloo_world(given.timeout)
        undo.callback(dist.destroy_process_group)
        try:
            report = measure(given, world, undo)
        except BaseException as error:
            code = exit_code_of_failure(world, error)
            undo.close()  # workers end with their lead in any case
            end_process(code)
    if report is not None:
        console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=LOG_WIDTH)
        console.print(report.table(), *report.lines(), sep="\n")
        if given.json is not None:
            given.json.write_text(json.dumps(report.as_data(), indent=2) + "\n")
    return 0


def measure(given: argparse.Namespace, world: World, undo: ExitStack) -> Report | None:
    """All measurements in one run; the report on rank 0, None elsewhere."""
    from bench.sync_measure import Bench
    from bench.sync_report import Report
    from bench.sync_scene import build_scene
    from bench.sync_sides import REFERENCE, SIDES, why_left_out

    scene = build_scene(
        _architecture(given),
        given.layout,
        world,
        undo,
        train_dtype=_torch_dtype(given.dtype),
        engine_dtype=_torch_dtype(given.engine_dtype),
        bytes_per_bucket=int(given.bucket_mb * (1 << 20)),
        timeout_s=given.timeout,
    )
    console = Console(stderr=True, highlight=False, quiet=not world.is_lead)
    bench = Bench(scene, lambda step: console.print(step, style="dim"))
    reasons = {name: why_left_out(name, scene) for name in given.transports}
    sides = {
        name: bench.prepare(name, SIDES[name], check=given.check) for name, reason in reasons.items() if reason is None
    }
    bench.rounds(sides, num_rounds=given.rounds)
    kernel = _kernel(given, world)
    if not world.is_lead:
        return None
    return Report(
        facts=_facts(given, scene),
        sides=[measured for _, measured in sides.values()],
        reference=REFERENCE,
        bound=_bound(given, scene),
        left_out={name: reason for name, reason in reasons.items() if reason is not None},
        kernel=kernel,
    )


def _kernel(given: argparse.Namespace, world: World) -> Any:
    """On rank 0 of a machine with a GPU, while the others wait."""
    import torch
    from bench.kernel_speed import kernel_speed

    def work() -> Any:
        if not world.is_lead or not torch.cuda.is_available():
            return None
        return kernel_speed(
            _architecture(given),
            given.layout,
            train_dtype=_torch_dtype(given.dtype),
            engine_dtype=_torch_dtype(given.engine_dtype),
            device="cuda",
            num_rounds=given.rounds,
        )

    return world.settle("kernel", work)


def _bound(given: argparse.Namespace, scene: Scene) -> int:
    from rlmegatron.weight_sync.traffic import least_bytes, model_bytes

    layout: SyncLayout = given.layout
    whole = model_bytes(scene.shard.rules, itemsize=scene.engine_dtype.itemsize)
    return least_bytes(whole, layout.train, engine_tensor=layout.engine_tensor)


def _facts(given: argparse.Namespace, scene: Scene) -> dict[str, Any]:
    from importlib.metadata import version

    import torch
    from bench.synthetic_model import num_elements

    arch = scene.shard.arch
    return {
        "layout": given.layout.text,
        "ranks": given.layout.num_ranks,
        "engines": given.layout.engines,
        "family": given.family,
        "bytes": num_elements(arch) * NUM_BYTES[given.dtype],
        "layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "dtype": given.dtype if given.dtype == given.engine_dtype else f"{given.dtype} -> {given.engine_dtype}",
        "bucket_bytes": scene.bytes_per_bucket,
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def _architecture(given: argparse.Namespace) -> Any:
    from bench.synthetic_model import architecture_for

    layout: SyncLayout = given.layout
    return architecture_for(
        given.family,
        num_bytes=given.gb * 1e9,
        itemsize=NUM_BYTES[given.dtype],
        layer_multiple=layout.train.pp * layout.vpp,
    )


def _torch_dtype(name: str) -> Any:
    from rlmegatron.learner.build import DTYPES

    return DTYPES[name]


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"--transports {text}: use each of {', '.join(TRANSPORTS)} once at most")
    return names


if __name__ == "__main__":
    sys.exit(main())
