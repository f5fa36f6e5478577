"""Metrics merge in any grouping to what the data taken together say, and absent never reads as NaN."""

import math
import pickle
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.drift import drift_stats
from rlmegatron.algorithms.loss_term import explained_variance_stat
from rlmegatron.metrics.values import (
    Distribution,
    ExplainedVariance,
    Last,
    Max,
    Mean,
    Metric,
    Min,
    Moments,
    Sum,
    from_parts,
)

KINDS = (Mean, Max, Min, Moments, Distribution)
CHUNKS = st.lists(st.lists(st.floats(-100, 100), max_size=5), min_size=3, max_size=3)


def explained(target, forecast):
    error = [t - f for t, f in zip(target, forecast, strict=True)]
    return ExplainedVariance(
        len(target), sum(target), sum(t * t for t in target), sum(error), sum(e * e for e in error)
    )


@given(CHUNKS)
@settings(max_examples=60, deadline=None)
def test_merging_in_any_grouping_is_taking_the_data_together(chunks):
    together = [x for chunk in chunks for x in chunk]
    for kind in KINDS:
        first, second, third = (kind.of(chunk) for chunk in chunks)
        expected = pytest.approx(kind.of(together).values("x"), abs=1e-4)
        assert first.merge(second).merge(third).values("x") == expected
        assert first.merge(second.merge(third)).values("x") == expected


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_a_distribution_is_what_the_statistics_module_says(data):
    expected = {
        "reward/mean": statistics.fmean(data),
        "reward/std": statistics.pstdev(data),
        "reward/min": min(data),
        "reward/max": max(data),
    }
    assert Distribution.of(data).values("reward/") == pytest.approx(expected, abs=1e-4)


def test_a_mean_weighs_entries_not_ranks():
    """One answer of 1 on one rank and three of 0 on another: 0.25, not the mean of means 0.5."""
    assert Mean.of([1.0]).merge(Mean.of([0.0, 0.0, 0.0])).values("acc") == {"acc": 0.25}


def test_sums_add_and_last_takes_the_later():
    assert Sum(2).merge(Sum(3)).values("tokens") == {"tokens": 5}
    assert Last(1e-4).merge(Last(2e-4)).values("lr") == {"lr": 2e-4}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_counted_is_absent(kind):
    assert kind.of([]).values("x") == {}
    assert kind.of(torch.zeros(3), torch.zeros(3, dtype=torch.bool)).values("x") == {}
    assert kind.of([]).merge(kind.of([2.0])).values("x") == kind.of([2.0]).values("x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_is_seen_whatever_the_order(kind):
    for left, right in (([1.0], [math.nan]), ([math.nan], [1.0]), ([1.0, math.nan, 2.0], [])):
        numbers = kind.of(left).merge(kind.of(right)).values("x")
        assert numbers and all(math.isnan(x) for x in numbers.values())


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_lists_give_the_same(kind):
    data = torch.tensor([[1.0, -4.0], [math.nan, 2.5]], requires_grad=True)
    mask = torch.tensor([[True, True], [False, True]])
    assert kind.of(data, mask) == kind.of([1.0, -4.0, 2.5])


def test_masks_must_fit():
    with pytest.raises(ValueError, match=r"mask has shape \[2\], but the data has \[3\]"):
        Mean.of(torch.zeros(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="a mask needs data that is a tensor"):
        Mean.of([1.0], torch.ones(1, dtype=torch.bool))


def test_names_join_with_the_separator_they_ask_for():
    assert set(Moments.of([1.0]).values("response/length")) == {"response/length_mean", "response/length_std"}
    assert set(Moments.of([1.0]).values("reward/")) == {"reward/mean", "reward/std"}


def test_explained_variance_of_hand_worked_forecasts():
    target = [1.0, 2.0, 3.0, 4.0]
    assert explained(target, target).values("ev") == {"ev": 1.0}
    assert explained(target, [2.5] * 4).values("ev") == {"ev": 0.0}
    # Errors 0, 1, 1, 0: variance 0.25 of 1.25. A constant offset costs nothing.
    assert explained(target, [1.0, 1.0, 2.0, 4.0]).values("ev")["ev"] == pytest.approx(0.8)
    assert explained(target, [t + 7 for t in target]).values("ev")["ev"] == pytest.approx(1.0)
    assert explained(target, [-t for t in target]).values("ev")["ev"] == pytest.approx(-3.0)


def test_explained_variance_is_of_all_parts_together():
    target, forecast = [0.0, 1.0, 5.0, 2.0, 9.0], [0.5, 0.0, 4.0, 4.0, 6.0]
    merged = explained(target[:2], forecast[:2]).merge(explained(target[2:], forecast[2:]))
    error = [t - f for t, f in zip(target, forecast, strict=True)]
    expected = 1 - statistics.pvariance(error) / statistics.pvariance(target)
    assert merged.values("ev")["ev"] == pytest.approx(expected)


@pytest.mark.parametrize("target", [[], [0.0, 0.0], [0.1, 0.1, 0.1], [1e6 + 0.1] * 7])
def test_equal_returns_leave_nothing_to_explain(target):
    assert explained(target, [0.0] * len(target)).values("ev") == {}


def test_statistics_of_losses_become_metrics():
    rng = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(64, generator=rng).double() for _ in range(3))
    counted = torch.arange(64) % 3 > 0
    stats = drift_stats(logp=a, old_logp=b, counted=counted)
    stats["explained_variance"] = explained_variance_stat(values=b, returns=c, counted=counted)
    numbers = {}
    for name, stat in stats.items():
        numbers |= from_parts(stat.reduction, stat.parts.tolist()).values(name)
    ratio, error = (a - b)[counted].exp(), (c - b)[counted]
    assert numbers["ratio_mean"] == pytest.approx(ratio.mean().item())
    assert numbers["ratio_max"] == pytest.approx(ratio.max().item())
    assert numbers["explained_variance"] == pytest.approx(1 - (error.var() / c[counted].var()).item())


def test_every_kind_is_a_metric_and_pickles():
    for metric in (Sum(1), Last(1), explained([1.0, 2.0], [0.0, 0.0]), *[kind.of([1.0]) for kind in KINDS]):
        assert isinstance(metric, Metric)
        assert pickle.loads(pickle.dumps(metric)) == metric
    assert not isinstance(1.0, Metric) and not isinstance({}, Metric)
