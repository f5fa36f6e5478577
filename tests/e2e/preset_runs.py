"""Trains several presets one after the other in one process, which starts one engine for all of them.

In: a directory and names of presets, or of `FURTHER` runs; each line on stdin is an override for all. Out: run
directories in it, with `metrics.jsonl` and, for a run that failed, `error.txt`. A run is that of launch/train.py from
the file on, but for its checkpoint, which would cost a start of Python each; all of them must have engines of one kind.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

from rlmegatron.distributed.world import World, start_world
from rlmegatron.learner.groups import stop_topology
from rlmegatron.preflight import examine
from rlmegatron.rollout.sglang_engine import SGLangEngine
from rlmegatron.trainer import build, online

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
FURTHER = {
    # No answer is its own prompt: every reward is 0, and no group is kept.
    "nothing_to_learn": (
        "grpo",
        "reward.args={answer_key: prompt}",
        "rollout.dynamic_sampling={enabled: true, max_prompts_ratio: 2, on_shortage: train}",
    ),
}
"""Name -> preset and overrides."""


class SharedEngine(SGLangEngine):
    """The engine that every run gets, and that none of them ends."""

    kept: SharedEngine | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SharedEngine:
        """The one that is there."""
        if cls.kept is None:
            cls.kept = super().__new__(cls)
        return cls.kept

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start the server for the first run alone."""
        if not hasattr(self, "_server"):
            super().__init__(*args, **kwargs)

    def shutdown(self) -> None:
        """Nothing: the next run needs it."""


def main(directory: Path, names: list[str], overrides: list[str]) -> None:
    world = start_world(timeout_s=600)
    build.SGLangEngine = SharedEngine  # type: ignore[misc]
    online.save = lambda *_: None
    try:
        for name in names:
            preset, *further = FURTHER.get(name, (name,))
            attempt(world, directory / name, str(CONFIGS / f"quickstart_{preset}.yaml"), [*overrides, *further])
    finally:
        if SharedEngine.kept is not None:
            SGLangEngine.shutdown(SharedEngine.kept)


def attempt(world: World, run_directory: Path, config: str, overrides: list[str]) -> None:
    try:
        cfg = examine(config, [*overrides, f"run_dir={run_directory}"], world_size=(world.size, "one process")).cfg
        with build.running(cfg, world) as built:
            online.train(built)
    except Exception:
        run_directory.mkdir(exist_ok=True)
        (run_directory / "error.txt").write_text(traceback.format_exc())
    finally:
        stop_topology()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], sys.stdin.read().splitlines())
