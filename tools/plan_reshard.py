"""Say what publishing new weights will move, for a configuration and a number of ranks, without any of them.

In: a config file, as for training. Out: bytes to each rank beside the least possible, who exchanges with whom, and the
memory that it takes. Needs no GPU and reads no weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from rlmegatron.cli import count_of
from rlmegatron.config.estimate import NUM_BYTES
from rlmegatron.config.load import ConfigError
from rlmegatron.models.replica import ReplicaLayout
from rlmegatron.models.rules import stages
from rlmegatron.models.table import read_architecture
from rlmegatron.preflight import Checked, examine
from rlmegatron.rollout.placement import place_engines
from rlmegatron.weight_sync.choose import choose_transport
from rlmegatron.weight_sync.forecast import Forecast, forecast
from rlmegatron.weight_sync.sources import exchange_groups

EPILOG = """\
what is printed:
  received   bytes that reach a rank's device from others in one publish: the least, the most, and all ranks together
  bound      (1/t - 1/n) M: what a rank must get at least that keeps 1/n of a model of M bytes and wants 1/t of it. Less
             is possible where all ranks hold something alike (norms), more where engines do (KV heads)
  groups     ranks that exchange weights with each other and nobody else; those within a node read each other's memory
             ('peer'), the others all-gather buckets ('collective')

examples:
  python tools/plan_reshard.py --config my.yaml --ranks 64
  python tools/plan_reshard.py --config my.yaml --ranks 512 --ranks-per-node 8 parallel.tensor=8 rollout.tensor=8
  python tools/plan_reshard.py --config my.yaml --ranks 64 --json plan.json

exit codes: 0 done, 2 a mistake in the configuration or the command line
"""
MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print; returns the exit code."""
    given = _parser().parse_args(argv)
    try:
        checked = examine(given.config, given.overrides, world_size=(given.ranks, "from --ranks"), plans_only=True)
        per_node = min(given.ranks_per_node, given.ranks)
        began = time.monotonic()
        engines, found = plan(checked, ranks_per_node=per_node)
    except (ConfigError, ValueError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print("\n".join([f"{given.config}: nothing was planned", *(f"  {one}" for one in problems)]), file=sys.stderr)
        return 2
    facts = describe(checked, engines, found, ranks_per_node=per_node, seconds=time.monotonic() - began)
    print("\n".join(f"{name:<10} {text}" for name, text in facts["text"].items()))
    if given.json:
        try:
            given.json.write_text(json.dumps(facts["numbers"], indent=2) + "\n")
        except OSError as error:
            print(f"--json {given.json}: cannot be written ({error.strerror})", file=sys.stderr)
            return 2
    return 0


def plan(checked: Checked, *, ranks_per_node: int) -> tuple[list[tuple[int, ...]], Forecast]:
    """The ranks of every engine, and what they will get."""
    cfg, arch = checked.cfg, read_architecture(checked.cfg.model.path)
    parallel, rollout = cfg.parallel, cfg.rollout
    placed = place_engines(
        world_size=checked.world_size,
        tensor=rollout.tensor,
        ranks_per_node=ranks_per_node,
        train_tensor=parallel.tensor,
    )
    engines = [placement.ranks for placement in placed]
    cut = stages(
        num_layers=arch.num_layers,
        pp=parallel.pipeline,
        vpp=parallel.virtual_pipeline,
        first=parallel.first_stage_layers,
        last=parallel.last_stage_layers,
    )
    with tqdm(total=rollout.tensor, desc="planning engine ranks", disable=None, leave=False) as bar:
        found = forecast(
            arch,
            ReplicaLayout(parallel.tensor, parallel.pipeline, ep=parallel.expert, etp=parallel.expert_tensor),
            cut,
            engines,
            engine_expert=rollout.expert,
            num_ranks=checked.world_size,
            ranks_per_node=ranks_per_node,
            itemsize=NUM_BYTES[cfg.engine_dtype],
            planned=bar.update,
        )
    return engines, found


def describe(
    checked: Checked, engines: Sequence[Sequence[int]], found: Forecast, *, ranks_per_node: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """`text` to print and `numbers` for JSON."""
    cfg, moved = checked.cfg, found.traffic
    transport, reason = choose_transport(
        cfg.weight_sync,
        train_dtype=cfg.model.dtype,
        engine_dtype=cfg.engine_dtype,
        num_nodes=-(-checked.world_size // ranks_per_node),
    )
    groups = exchange_groups(moved.source_ranks)
    far = [group for group in groups if len({rank // ranks_per_node for rank in group}) > 1]
    most, least = max(moved.received), min(moved.received)
    ratio = f" ({most / moved.bound:.2f} x the bound of {moved.bound / MIB:,.1f})" if moved.bound else ""
    size = max(map(len, groups))
    text = {
        "model": f"{checked.cfg.model.path}, {found.num_bytes / MIB:,.1f} MiB in the engines' type",
        "ranks": f"{checked.world_size} on nodes of {ranks_per_node}; {len(engines)} engines of {len(engines[0])}",
        "engines": ", ".join(str(tuple(ranks)) for ranks in engines[:4]) + (", ..." if len(engines) > 4 else ""),
        "received": f"{least / MIB:,.1f} to {most / MIB:,.1f} MiB a rank{ratio}, {moved.total / MIB:,.1f} MiB in all",
        "groups": f"{len(groups)} of up to {size} ranks; {len(far)} of them span nodes",
        "messages": f"a rank reads from up to {max(map(len, moved.source_ranks)) - 1} others, in up to "
        f"{max(found.num_pieces):,} pieces",
        "transport": f"{transport} ({reason})",
        "memory": _memory(transport, cfg.weight_sync.bucket_mb, any_far=bool(far)),
        "planned in": f"{seconds:.1f} s, one engine rank after the other; a run plans them side by side",
    }
    numbers = {
        "transport": transport,
        "model_bytes": found.num_bytes,
        "received": moved.received,
        "sent": moved.sent,
        "bound": moved.bound,
        "total": moved.total,
        "engines": [list(ranks) for ranks in engines],
        "groups": [list(group) for group in groups],
        "groups_across_nodes": len(far),
        "seconds": seconds,
    }
    return {"text": text, "numbers": numbers}


def _memory(transport: str, bucket_mb: int, *, any_far: bool) -> str:
    buckets = f"two buckets of {bucket_mb} MiB (weight_sync.bucket_mb) at most"
    if transport == "hf_stream":
        return f"a bucket of {bucket_mb} MiB of whole tensors; the figures above are those of 'peer' and 'collective'"
    if transport == "collective":
        return buckets
    return "nothing beside the weights within a node" + (f", {buckets} in groups that span nodes" if any_far else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plan_reshard.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file of the run")
    parser.add_argument("--ranks", required=True, type=count_of, metavar="N", help="ranks of the run")
    parser.add_argument("--ranks-per-node", type=count_of, default=8, metavar="N", help="GPUs of a node (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, rank by rank")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings on top of the file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
