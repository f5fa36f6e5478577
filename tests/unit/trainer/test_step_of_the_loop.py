"""What a step of the loop does with what it measured; models, credit and updates are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlmegatron.config.algorithm import KLConfig
from rlmegatron.metrics.log import StepLog
from rlmegatron.trainer import online
from rlmegatron.trainer.adapted import Adapted


@pytest.mark.parametrize(("has_critic", "expected"), [(True, [0.5, 0.5, 0.49]), (False, [0.49, 0.4802, 0.470596])])
def test_the_divergences_weight_waits_for_the_policy(
    monkeypatch: pytest.MonkeyPatch, has_critic: bool, expected: list[float]
) -> None:
    """Two steps are the critic's alone: there the divergence is 0 whatever its weight, which must not fall for it.

    By hand: a divergence of 0 takes 0.2 x 100 / 1000 = 2 % of the weight each step.
    """
    batch = SimpleNamespace(local=None, facts=[None] * 100)
    adapted = Adapted(0.5, None)
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(
            algorithm=SimpleNamespace(kl=KLConfig(where="reward", estimator="k2", target=0.1, horizon=1000)),
            critic=SimpleNamespace(warmup_steps=2),
        ),
        learner=SimpleNamespace(
            topology=SimpleNamespace(tp_rank=1, pp_rank=0), critic=object() if has_critic else None
        ),
        credit=SimpleNamespace(assign=lambda scored: (scored, {}), kl_from_reference=lambda local: 0.0),
        adapted=adapted,
    )
    monkeypatch.setattr(online, "add_scores", lambda learner, scored: (scored, None))
    monkeypatch.setattr(online, "_update", lambda *_: None)
    found = []
    for step in (1, 2, 3):
        online._learn(run, batch, StepLog(step), step)  # type: ignore[arg-type]
        found.append(adapted.kl_coef)
    assert found == pytest.approx(expected)
