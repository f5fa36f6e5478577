"""Who owns the device: the visible lines that move it between learner and engines, and recovery of a dead engine.

In: a run. Out: weights, optimizer state and caches where the next phase needs them. On a CPU nothing moves, but the
order is the same and engines refuse to work out of turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlmegatron.distributed.world import RankFailure
from rlmegatron.rollout.api import SamplingConfig
from rlmegatron.rollout.sglang_engine import SGLangEngine
from rlmegatron.trainer.collect import EnginesDied, generate
from rlmegatron.trainer.run import Run
from rlmegatron.types import Prompt, SampleGroup
from rlmegatron.weight_sync.publish import publish


def publish_weights(run: Run, version: int) -> None:
    """Make every engine serve the policy as `version`; optimizer state leaves the device first.

    When an engine turns out to be dead and the configuration says so, it is restarted once.
    """
    run.learner.optimizer_to_host()
    try:
        publish(run.world, run.transport, run.rollout.engine, version=version, verifier=run.verifier)
    except RankFailure as failure:
        if not (_may_restart(run) and _some_engine_is_dead(run)):
            raise
        _restart_and_publish(run, str(failure), version)


def hand_device_to_engine(run: Run) -> None:
    """The learner's weights leave, the KV cache comes."""
    run.learner.weights_to_host()
    run.rollout.on_engine(run.world, "wake", lambda engine: engine.wake(kv_cache=True))


def hand_device_to_learner(run: Run) -> None:
    """The engines sleep, the learner's weights and optimizer state come back."""
    run.rollout.on_engine(run.world, "sleep", _sleep_if_alive)
    run.learner.to_device()


def generate_or_recover(
    run: Run, prompts: Sequence[Prompt], sampling: SamplingConfig, *, num_samples: int, purpose: str, version: int
) -> list[SampleGroup]:
    """Generate; when an engine dies and the configuration says so, restart it once and generate again.

    Seeds belong to samples, so the second attempt gives the answers that the first would have given.
    """
    try:
        return generate(run.world, run.rollout, prompts, sampling, num_samples=num_samples, purpose=purpose)
    except EnginesDied as death:
        if not _may_restart(run):
            raise RankFailure(death.report) from None
        _restart_and_publish(run, death.report, version)
        hand_device_to_engine(run)
    return generate(run.world, run.rollout, prompts, sampling, num_samples=num_samples, purpose=purpose)


def _may_restart(run: Run) -> bool:
    return run.cfg.rollout.on_engine_death == "restart" and not run.rollout.restarted


def _some_engine_is_dead(run: Run) -> bool:
    engine = run.rollout.engine
    return any(run.world.gather(engine is not None and not engine.alive()))


def _restart_and_publish(run: Run, report: str, version: int) -> None:
    """An engine starts on an empty device, as at the beginning; then everything is as before any publish."""
    run.say(f"{report}\nrestarting the engine once and publishing version {version} again")
    run.rollout.restarted = True
    run.learner.weights_to_host()
    run.rollout.on_engine(run.world, "engine restart", _restart_if_dead)
    hand_device_to_learner(run)
    publish_weights(run, version)


def _sleep_if_alive(engine: SGLangEngine) -> None:
    if engine.alive():
        engine.sleep()


def _restart_if_dead(engine: SGLangEngine) -> None:
    if engine.alive():
        engine.distrust_weights()
    else:
        engine.restart()
