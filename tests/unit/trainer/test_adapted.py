"""Numbers that a run adapts: they follow what was measured, and come back from a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from rlmegatron.algorithms.value_scale import ReturnScale
from rlmegatron.config.algorithm import KLConfig
from rlmegatron.trainer.adapted import Adapted

ADAPTIVE = KLConfig(where="loss", target=0.1, horizon=1000)


def test_the_weight_moves_towards_the_target() -> None:
    """By hand: 0.5 x (1 + clip(0.15 / 0.1 - 1, -0.2, 0.2) x 100 / 1000), and down for a divergence of 0."""
    adapted = Adapted(0.5, None)
    adapted.adapt_kl(ADAPTIVE, measured=0.15, num_samples=100)
    assert adapted.kl_coef == pytest.approx(0.5 * 1.02)
    adapted.adapt_kl(ADAPTIVE, measured=0.0, num_samples=100)
    assert adapted.kl_coef == pytest.approx(0.5 * 1.02 * 0.98)


def test_without_a_target_or_samples_it_stays() -> None:
    adapted = Adapted(0.5, None)
    adapted.adapt_kl(KLConfig(where="loss"), measured=9.0, num_samples=100)
    adapted.adapt_kl(ADAPTIVE, measured=9.0, num_samples=0)
    adapted.adapt_kl(ADAPTIVE, measured=None, num_samples=100)  # every token was masked out: not a divergence of 0
    assert adapted.kl_coef == 0.5


def test_a_checkpoint_brings_back_what_was_adapted() -> None:
    scale = ReturnScale().update(torch.tensor([2.0, 6.0, 26.0]))
    state = json.loads(json.dumps(Adapted(0.7, scale).state(ADAPTIVE)))
    again = Adapted(0.5, ReturnScale())
    again.load_state(state, ADAPTIVE)
    assert again == Adapted(0.7, scale)
    fixed = Adapted(0.5, ReturnScale())
    fixed.load_state(state, KLConfig(where="loss"))
    assert fixed.kl_coef == 0.5  # that of today's configuration


def test_a_target_that_is_new_starts_from_todays_weight() -> None:
    state = json.loads(json.dumps(Adapted(0.7, None).state(KLConfig(where="loss"))))
    again = Adapted(0.5, None)
    again.load_state(state, ADAPTIVE)
    assert again.kl_coef == 0.5


@pytest.mark.parametrize(("before", "now"), [(None, ReturnScale()), (ReturnScale(), None)])
def test_a_critic_keeps_the_units_it_learnt(before: ReturnScale | None, now: ReturnScale | None) -> None:
    state = Adapted(0.5, before).state(ADAPTIVE)
    with pytest.raises(ValueError, match=r"critic.normalize_returns: was (true|false) before the checkpoint and is"):
        Adapted(0.5, now).load_state(state, ADAPTIVE)
