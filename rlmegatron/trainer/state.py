"""Saving, resuming and exporting a run: which parts there are and in what order they are written.

In: a `Run`. Out: checkpoints/ and export/. Every rank calls each function; rank 0 alone touches plain files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlmegatron.checkpoint.rng import rng_state, seed_rng, set_rng_state
from rlmegatron.checkpoint.tensors import load_tensors, save_tensors
from rlmegatron.learner.build import DTYPES
from rlmegatron.models.export import export
from rlmegatron.trainer.run import Run


def save(run: Run, step: int) -> None:
    """Write a checkpoint, unless that of this step is there; it has its name only once it is whole."""
    world, directory = run.world, run.checkpoints
    if world.lead(directory.newest) == step:
        return
    trainings = run.learner.trainings
    world.lead(lambda: _open(run, step, list(trainings)))
    for name, (model, training) in trainings.items():
        save_tensors(model, training, directory.partial(step) / name)
    rngs = world.gather(rng_state())
    world.lead(lambda: directory.seal(step, _plain_state(run, step, rngs)))


def restore(run: Run) -> int:
    """Fill the run from the newest whole checkpoint; its step, or 0 when there is none."""
    world, directory = run.world, run.checkpoints
    step = world.lead(directory.newest)
    if step is None:
        seed_rng(run.cfg.seed, 0, world.rank)
        return 0
    state = world.lead(lambda: directory.state(step))
    for name, (model, training) in run.learner.trainings.items():
        num_steps = place_in_schedule(state, name, updates_per_step=run.cfg.updates_per_step[name])
        load_tensors(model, training, directory.of(step) / name, num_steps=num_steps)
    if world.is_lead:
        assert run.prompts is not None
        run.prompts.load_state(state["prompts"])
    if "adapted" in state:  # nothing was, before there was something to adapt
        run.adapted.load_state(state["adapted"], run.cfg.algorithm.kl)
    world.settle("resume", lambda: _restore_rng(run, state, step))
    return step


def export_policy(run: Run) -> Path:
    """Write the policy as a Hugging Face directory under export/."""
    cfg, out = run.cfg, run.directory / "export"
    failure: Exception | None = None
    if run.learner.topology.is_first_replica:
        try:
            export(
                run.stream,
                run.learner.actor.model.arch,
                source=cfg.model.path,
                out=out,
                dtype=DTYPES[cfg.checkpoint.export_dtype or cfg.model.dtype],
                writes=run.world.is_lead,
                bytes_per_bucket=cfg.weight_sync.bucket_mb << 20,
            )
        except Exception as error:  # rank 0 alone meets the file system, and the others must learn of it
            failure = error
    run.world.settle("export", lambda: _raise(failure))
    return out


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _open(run: Run, step: int, names: list[str]) -> None:
    run.checkpoints.open(step)
    for name in names:
        (run.checkpoints.partial(step) / name).mkdir()


def _plain_state(run: Run, step: int, rngs: list[dict[str, Any]]) -> dict[str, Any]:
    assert run.prompts is not None, "rank 0 holds the prompts"
    return {
        "step": step,
        "seed": run.cfg.seed,
        "distributed_optimizer": run.cfg.parallel.distributed_optimizer,
        "prompts": run.prompts.state(),
        "updates_per_step": run.cfg.updates_per_step,
        "optimizer_steps": {name: training.schedule.num_steps for name, (_, training) in run.learner.trainings.items()},
        "adapted": run.adapted.state(run.cfg.algorithm.kl),
        "rng": rngs,
    }


def place_in_schedule(state: Mapping[str, Any], name: str, *, updates_per_step: int) -> int:
    """How many of today's optimizer steps stand for those that were taken.

    A step of the loop may have more or fewer now, and a schedule that ended early would leave a rate of 0.
    """
    taken: int = state["optimizer_steps"][name]
    before: int = state.get("updates_per_step", {}).get(name, updates_per_step)
    return round(taken * updates_per_step / before)


def _restore_rng(run: Run, state: dict[str, Any], step: int) -> None:
    rank = run.world.rank
    if rank < len(state["rng"]):
        set_rng_state(state["rng"][rank])
    else:
        seed_rng(run.cfg.seed, step, rank)
