"""The adapted coefficient against numbers worked out by hand, and in a loop with something to control."""

import math

import pytest

from rlmegatron.algorithms.kl_control import adapted


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        (6.0, 1.0),  # on target
        (6.6, 1 + 0.1 * 0.5),
        (5.4, 1 - 0.1 * 0.5),
        (60.0, 1 + 0.2 * 0.5),  # cut
        (0.0, 1 - 0.2 * 0.5),
        (-3.0, 1 - 0.2 * 0.5),  # k1 of one step may be negative
    ],
)
def test_hand_worked_cases(measured, factor):
    found = adapted(0.5, measured=measured, target=6.0, num_samples=256, horizon=512)
    assert found == pytest.approx(0.5 * factor, rel=1e-12)


def test_a_divergence_that_falls_with_the_weight_ends_at_its_target():
    coef = 0.001
    for _ in range(400):
        coef = adapted(coef, measured=0.02 / coef, target=0.5, num_samples=64, horizon=256)
    assert 0.02 / coef == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("measured", [math.nan, math.inf, -math.inf])
def test_a_measurement_that_is_no_number_is_refused(measured):
    with pytest.raises(ValueError, match=f"the measured divergence is {measured}"):
        adapted(0.1, measured=measured, target=1.0, num_samples=1, horizon=10)


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 10), (-1.0, 10), (1.0, 0)])
def test_a_target_or_horizon_that_is_not_positive_is_refused(target, horizon):
    with pytest.raises(ValueError, match="target and horizon must be positive"):
        adapted(0.1, measured=1.0, target=target, num_samples=1, horizon=horizon)


def test_a_horizon_so_short_that_the_weight_could_change_its_sign_is_refused():
    assert adapted(0.1, measured=0.0, target=1.0, num_samples=49, horizon=10) > 0
    with pytest.raises(ValueError, match="horizon must be more than 0.2 x the 50 samples of a step, got 10"):
        adapted(0.1, measured=1.0, target=1.0, num_samples=50, horizon=10)
