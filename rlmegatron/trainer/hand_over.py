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
    """Make every engine serve the policy as `version`; optimizer state leaves the device first."""
    run.learner.optimizer_to_host()
    publish(run.world, run.transport, run.rollout.engine, version=version, verify=run.cfg.weight_sync.verify)


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
        if run.cfg.rollout.on_engine_death == "stop" or run.rollout.restarted:
            raise RankFailure(death.report) from None
        _recover(run, death, version)
    return generate(run.world, run.rollout, prompts, sampling, num_samples=num_samples, purpose=purpose)


def _recover(run: Run, death: EnginesDied, version: int) -> None:
    run.say(f"{death.report}\nrestarting the engine once and publishing version {version} again")
    run.rollout.restarted = True
    hand_device_to_learner(run)
    run.rollout.on_engine(run.world, "engine restart", _restart_if_dead)
    publish_weights(run, version)
    hand_device_to_engine(run)


def _sleep_if_alive(engine: SGLangEngine) -> None:
    if engine.alive():
        engine.sleep()


def _restart_if_dead(engine: SGLangEngine) -> None:
    if not engine.alive():
        engine.restart()
