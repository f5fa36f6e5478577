"""The gradient of every algorithm knows nothing of ranks, micro-batches, packing, or the order of samples.

From judged groups, whose members lie on different ranks, through credit and loss to reduced gradients. What this does
not prove: anything about more than 4 ranks, or that the numbers are right (the unit tests of the algorithms do that).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from sharded import Layout
from step_gradients import Algorithm, Case, distance, gradients

ALGORITHMS = {
    "ppo": Algorithm({"advantage": "gae", "kl": {"where": "reward", "estimator": "k2", "coef": 0.1}}),
    "ppo critic": Algorithm({"advantage": "gae", "aggregation": "seq_mean_token_mean"}, critic=True),
    "grpo": Algorithm({"kl": {"where": "loss", "estimator": "k3_unbiased", "coef": 0.1}, "entropy_coef": 0.01}),
    "dr_grpo": Algorithm({"normalize_std": False, "aggregation": "seq_mean_token_sum_norm"}),
    "dapo": Algorithm({"clip_high": 0.28, "dual_clip": 3.0, "importance": {"level": "token", "high": 1.2}}),
    "rloo": Algorithm({"advantage": "rloo", "kl": {"where": "reward", "estimator": "k1", "coef": 0.1}}),
    "reinforce_pp": Algorithm({"advantage": "reinforce_pp", "gamma": 0.9, "policy_loss": "reinforce"}),
    "reinforce_pp_baseline": Algorithm({"advantage": "reinforce_pp_baseline", "aggregation": "seq_mean_token_sum"}),
    "remax": Algorithm({"advantage": "remax", "importance": {"level": "geometric", "mode": "mask", "low": 0.9}}),
    "opo": Algorithm({"advantage": "opo"}),
    "gspo": Algorithm({"policy_loss": "gspo", "aggregation": "seq_mean_token_mean"}),
    "cispo": Algorithm({"policy_loss": "cispo", "importance": {"level": "sequence"}}),
    "gpg": Algorithm({"advantage": "gpg", "policy_loss": "reinforce"}),
}
TOLERANCE = 1e-6
PACKED, SINGLE = 1000, 1
REFERENCE = Case(Layout(1, {}), PACKED, order=0)
DP2 = Case(Layout(2, {}), 40, order=1)
MORE = [
    Case(Layout(4, {}), PACKED, order=3),
    Case(Layout(2, {"tensor": 2}), PACKED, order=4),
    Case(Layout(2, {"pipeline": 2}), 40, order=5),
    Case(Layout(4, {"tensor": 2, "sequence": True}), 40, order=6),
]


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, dict[str, Any]]:
    """On one rank, everything in one micro-batch."""
    return run_ranks(gradients, 1, str(models / "Qwen3"), REFERENCE, ALGORITHMS)[0]


def assert_same_gradients(
    models: Path, expected: dict[str, dict[str, Any]], case: Case, names: Sequence[str] = tuple(ALGORITHMS)
) -> None:
    algorithms = {name: ALGORITHMS[name] for name in names}
    found = run_ranks(gradients, case.layout.num_ranks, str(models / "Qwen3"), case, algorithms)
    far = {
        (rank, name): distance(grads, expected[name])
        for rank, of_rank in enumerate(found)
        for name, grads in of_rank.items()
    }
    assert max(far.values()) < TOLERANCE, far


def test_data_parallel_ranks_change_no_gradient(models: Path, expected: dict[str, dict[str, Any]]) -> None:
    assert_same_gradients(models, expected, DP2)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_no_layout_changes_a_gradient(models: Path, expected: dict[str, dict[str, Any]], case: Case) -> None:
    assert_same_gradients(models, expected, case)


@pytest.mark.slow
def test_packing_changes_no_gradient(models: Path, expected: dict[str, dict[str, Any]]) -> None:
    """Every sample alone in its micro-batch; one algorithm for each aggregation and each kind of ratio."""
    names = ("ppo critic", "dr_grpo", "reinforce_pp_baseline", "gspo", "cispo")
    assert_same_gradients(models, expected, Case(Layout(1, {}), SINGLE, order=2), names)


def test_the_algorithms_differ(expected: dict[str, dict[str, Any]]) -> None:
    """The comparison can tell: no two of them have the same gradient."""
    actors = [name for name in ALGORITHMS if name != "ppo critic"]
    near = [
        (one, other)
        for number, one in enumerate(actors)
        for other in actors[:number]
        if distance(expected[one], expected[other]) < 0.01
    ]
    assert not near
