"""Publishing: the one order of operations that makes an engine serve the learner's weights, all or nothing.

In: the world, a transport and this rank's engine, if it leads one. Out: every engine serves `version`, or every rank
raises and no engine generates. Must never know how weights travel.
"""

from __future__ import annotations

from rlmegatron.distributed.world import RankFailure, World
from rlmegatron.rollout.api import RolloutEngine
from rlmegatron.weight_sync.transport import Transport
from rlmegatron.weight_sync.verify import Verifier


def publish(
    world: World, transport: Transport, engine: RolloutEngine | None, *, version: int, verifier: Verifier | None
) -> None:
    """Collective. The learner's weights must be on the device and its optimizer state off it (`learner.residency`).

    An engine whose update failed, on any rank, refuses to generate until a publish succeeds; so does one whose
    neighbours failed, even in their very last step. Raises RankFailure on every rank.
    """
    try:
        world.settle("publish (open)", lambda: _open(engine))
        _transfer(world, transport, engine)
        if verifier is not None:
            verifier.verify(engine)
        world.settle("publish (close)", lambda: _close(engine, version))
    except RankFailure:
        if engine is not None:
            engine.distrust_weights()
        raise


def _transfer(world: World, transport: Transport, engine: RolloutEngine | None) -> None:
    failure: Exception | None = None
    try:
        transport.transfer(engine)
    except Exception as error:
        failure = error
    world.settle("publish (transfer)", lambda: _check(failure))


def _open(engine: RolloutEngine | None) -> None:
    if engine is not None:
        engine.wake(weights=True)
        engine.begin_weight_update()


def _close(engine: RolloutEngine | None, version: int) -> None:
    if engine is not None:
        engine.end_weight_update(version=version)


def _check(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
