"""What runs must agree on: the engine with the learner, and one run with another, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import metrics_of, samples_of

AGREEMENT = 1e-4
COMPARED = (
    "reward/mean",
    "reward/std",
    "response/length_mean",
    "response/clip_ratio",
    "rollout/entropy",
    "actor/loss",
    "actor/entropy",
    "actor/approx_kl",
    "actor/grad_norm",
)


def assert_engine_and_learner_agree(run: Path, steps: Sequence[int]) -> None:
    rows = metrics_of(run)
    for step in steps:
        assert rows[step]["rollout/logp_diff_max"] < AGREEMENT, f"step {step}: {rows[step]}"
        assert {sample["weight_version"] for sample in samples_of(run, step)} == {step - 1}


def assert_same_step(run: Path, other: Path, step: int) -> None:
    assert samples_of(run, step) == samples_of(other, step)
    found, expected = metrics_of(run)[step], metrics_of(other)[step]
    for name in COMPARED:
        assert found[name] == pytest.approx(expected[name], rel=AGREEMENT, abs=AGREEMENT), f"step {step}: {name}"
