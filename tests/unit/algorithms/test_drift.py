"""The statistics of an update's drift against loops in Python floats and a divergence known exactly."""

import math

import pytest
import torch

from rlmegatron.algorithms.drift import drift_stats


def mean_of(stat):
    return float(stat.parts[0] / stat.parts[1])


def random_pair(num_tokens, seed):
    rng = torch.Generator().manual_seed(seed)
    logp = -torch.rand(num_tokens, generator=rng, dtype=torch.float64) * 3
    old_logp = logp + 0.5 * torch.randn(num_tokens, generator=rng, dtype=torch.float64)
    return logp, old_logp, torch.rand(num_tokens, generator=rng) < 0.7


def test_the_statistics_are_what_a_loop_says():
    logp, old_logp, counted = random_pair(200, seed=0)
    stats = drift_stats(logp=logp, old_logp=old_logp, counted=counted)
    kept = counted.tolist()
    log_ratio = [a - b for a, b, keep in zip(logp.tolist(), old_logp.tolist(), kept, strict=True) if keep]
    ratios = [math.exp(d) for d in log_ratio]
    assert mean_of(stats["ratio_mean"]) == pytest.approx(sum(ratios) / len(ratios))
    assert float(stats["ratio_max"].parts) == pytest.approx(max(ratios))
    assert mean_of(stats["approx_kl_k1"]) == pytest.approx(-sum(log_ratio) / len(log_ratio))
    k3 = [r - 1 - d for r, d in zip(ratios, log_ratio, strict=True)]
    assert mean_of(stats["approx_kl"]) == pytest.approx(sum(k3) / len(k3))
    assert all(stat.parts[-1] == len(ratios) for stat in stats.values() if stat.reduction == "mean")


def test_both_estimates_have_the_divergence_of_the_old_policy_from_the_new_as_mean():
    """1,000 tokens drawn in exact proportion from the old policy."""
    old, new = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    exact = sum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    drawn = torch.tensor([0] * 500 + [1] * 300 + [2] * 200)
    old_logp, logp = (torch.tensor(p, dtype=torch.float64).log()[drawn] for p in (old, new))
    stats = drift_stats(logp=logp, old_logp=old_logp, counted=torch.ones(1000, dtype=torch.bool))
    assert mean_of(stats["approx_kl"]) == pytest.approx(exact)
    assert mean_of(stats["approx_kl_k1"]) == pytest.approx(exact)
    assert mean_of(stats["ratio_mean"]) == pytest.approx(1.0)


def test_they_are_detached_and_merge_to_those_of_the_whole():
    logp, old_logp, counted = random_pair(60, seed=1)
    logp.requires_grad_()
    whole = drift_stats(logp, old_logp, counted)
    parts = [drift_stats(logp[at], old_logp[at], counted[at]) for at in (slice(0, 17), slice(17, 17), slice(17, 60))]
    for name, stat in whole.items():
        merged = parts[0][name].merge(parts[1][name]).merge(parts[2][name])
        assert merged.parts.tolist() == pytest.approx(stat.parts.tolist(), rel=1e-12)
        assert not stat.parts.requires_grad


def test_tokens_that_do_not_count_may_be_nan_and_far_ones_stay_finite():
    logp = torch.tensor([math.nan, 50.0, -50.0])
    stats = drift_stats(logp, torch.zeros(3), torch.tensor([False, True, True]))
    assert all(stat.parts.isfinite().all() for stat in stats.values())
    assert float(stats["ratio_max"].parts) == pytest.approx(math.exp(20), rel=1e-6)
    assert stats["approx_kl_k1"].parts.tolist() == [0.0, 2.0]


def test_nothing_counted_is_no_statistic():
    stats = drift_stats(torch.full((2,), math.nan), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert [stat.parts.tolist() for stat in stats.values()] == [[0.0, 0.0]] * 3 + [[-math.inf]]
