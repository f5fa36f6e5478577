"""Weights between engine and learner against a loop, the identity that they exist for, and their edges."""

import math
from itertools import pairwise, product

import pytest
import torch

from rlmegatron.algorithms.importance import LEVELS, MODES, importance_weights

LENGTHS = [6, 0, 2, 12, 4, 3, 1, 2, 9]
BOUNDS = {"low": 0.7, "high": 1.4}
every_kind = pytest.mark.parametrize(("level", "mode"), [*product(LEVELS, MODES)])


def random_batch(seed):
    """The last answer has no counted token."""
    rng = torch.Generator().manual_seed(seed)
    num_tokens, cu_seqlens = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)
    old_logp = -torch.rand(num_tokens, generator=rng, dtype=torch.float64)
    rollout_logp = old_logp + 0.5 * torch.randn(num_tokens, generator=rng, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=rng) < 0.7
    mask[-LENGTHS[-1] :] = False
    return {"old_logp": old_logp, "rollout_logp": rollout_logp, "mask": mask, "cu_seqlens": cu_seqlens}


def slow_weights(old_logp, rollout_logp, mask, cu_seqlens, level, mode, low, high):
    """Weights per token, and the ratios of what is judged: tokens or answers."""
    weights, ratios = [0.0] * len(mask), []
    for start, stop in pairwise(cu_seqlens):
        counted = [i for i in range(start, stop) if mask[i]]
        gaps = {i: old_logp[i] - rollout_logp[i] for i in counted}
        total = math.fsum(gaps.values())
        answer = {"token": 0.0, "sequence": total, "geometric": total / max(len(counted), 1)}[level]
        of_tokens = {i: math.exp(gaps[i] if level == "token" else answer) for i in counted}
        ratios += of_tokens.values() if level == "token" else [math.exp(answer)] * bool(counted)
        for i, ratio in of_tokens.items():
            weights[i] = min(ratio, high) if mode == "truncate" else ratio * (low <= ratio <= high)
    return weights, ratios


@every_kind
def test_weights_and_statistics_are_what_a_loop_says(level, mode):
    batch = random_batch(seed=1)
    found = importance_weights(**batch, level=level, mode=mode, **BOUNDS)
    lists = {name: tensor.tolist() for name, tensor in batch.items()}
    weights, ratios = slow_weights(**lists, level=level, mode=mode, **BOUNDS)
    assert found.weights.tolist() == pytest.approx(weights, rel=1e-6)
    assert found.kept.tolist() == [weight > 0 for weight in weights]
    assert found.weights.dtype == torch.float32
    above, outside = sum(r > 1.4 for r in ratios), sum(not 0.7 <= r <= 1.4 for r in ratios)
    extreme = ("truncated_fraction", above) if mode == "truncate" else ("masked_fraction", outside)
    assert 0 < above < outside < len(ratios)
    gaps = [b - a for a, b, m in zip(lists["old_logp"], lists["rollout_logp"], lists["mask"], strict=True) if m]
    expected = {
        "ratio_mean": [sum(ratios), len(ratios)],
        "ratio_max": [max(ratios)],
        "ratio_min": [min(ratios)],
        extreme[0]: [extreme[1], len(ratios)],
        "kl": [sum(gaps), len(gaps)],
    }
    assert {name: stat.parts.tolist() for name, stat in found.stats.items()} == {
        name: pytest.approx(parts) for name, parts in expected.items()
    }


@every_kind
def test_micro_batches_get_the_weights_and_statistics_of_the_whole(level, mode):
    batch, bounds = random_batch(seed=1), [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    whole = importance_weights(**batch, level=level, mode=mode, **BOUNDS)
    parts = []
    for first, last in ((0, 4), (4, 4), (4, 9)):
        at = slice(bounds[first], bounds[last])
        part = {name: tensor[at] for name, tensor in batch.items() if name != "cu_seqlens"}
        cu_seqlens = torch.tensor(bounds[first : last + 1]) - bounds[first]
        parts.append(importance_weights(**part, cu_seqlens=cu_seqlens, level=level, mode=mode, **BOUNDS))
    assert torch.cat([part.weights for part in parts]).equal(whole.weights)
    assert torch.cat([part.kept for part in parts]).equal(whole.kept)
    for name, stat in whole.stats.items():
        merged = parts[0].stats[name].merge(parts[1].stats[name]).merge(parts[2].stats[name])
        assert merged.parts.tolist() == pytest.approx(stat.parts.tolist(), rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_tokens_of_the_engine_have_the_learners_mean(level):
    """All 9 answers of two tokens, as often as the engine draws them, without bounds in the way."""
    engine, learner = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    answers = torch.tensor(list(product(range(3), repeat=2)))
    worth = torch.tensor([1.0, -2.0, 7.0]).double()
    found = importance_weights(
        learner.log()[answers].flatten(),
        engine.log()[answers].flatten(),
        torch.ones(18, dtype=torch.bool),
        torch.arange(0, 19, 2),
        level=level,
        mode="truncate",
        low=0.0,
        high=1e9,
    )
    drawn, first = engine[answers].prod(1), worth[answers[:, 0]]
    assert float((drawn * found.weights[::2] * first).sum()) == pytest.approx(float((learner * worth).sum()), rel=1e-6)


@every_kind
def test_equal_probabilities_change_nothing(level, mode):
    batch = random_batch(seed=3)
    found = importance_weights(**{**batch, "rollout_logp": batch["old_logp"]}, level=level, mode=mode, **BOUNDS)
    assert found.weights.equal(batch["mask"].float()) and found.kept.equal(batch["mask"])
    assert found.stats["kl"].parts[0] == 0.0


@every_kind
def test_what_does_not_count_may_be_nan_and_what_counts_is_not_hidden(level, mode):
    batch = random_batch(seed=4)
    clean = importance_weights(**batch, level=level, mode=mode, **BOUNDS)
    batch["rollout_logp"][~batch["mask"]] = math.nan
    found = importance_weights(**batch, level=level, mode=mode, **BOUNDS)
    assert found.weights.equal(clean.weights)
    assert all(found.stats[name].parts.equal(stat.parts) for name, stat in clean.stats.items())
    batch["rollout_logp"][batch["mask"].nonzero()[0]] = math.nan
    assert importance_weights(**batch, level=level, mode=mode, **BOUNDS).weights.isnan().any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [-50.0, 50.0])
def test_far_probabilities_give_finite_weights(level, gap):
    batch = {"old_logp": torch.tensor([gap, gap]), "rollout_logp": torch.zeros(2), "mask": torch.tensor([True, True])}
    batch["cu_seqlens"] = torch.tensor([0, 2])
    truncated = importance_weights(**batch, level=level, mode="truncate", **BOUNDS)
    assert truncated.weights.tolist() == pytest.approx([1.4 if gap > 0 else math.exp(-20)] * 2, rel=1e-6)
    masked = importance_weights(**batch, level=level, mode="mask", **BOUNDS)
    assert masked.weights.tolist() == [0.0, 0.0] and not masked.kept.any()
    assert masked.stats["kl"].parts.tolist() == [-2 * gap, 2.0]


def test_an_answer_of_100_000_tokens_in_single_precision_has_the_exact_product():
    """Its log-probabilities' own sums, 3e5, are known to 0.03 only in single precision; the gaps are 1e-5 each."""
    num_tokens = 100_000
    old_logp = torch.full((num_tokens,), -3.0)
    rollout_logp = torch.full((num_tokens,), -3.00001)
    batch = {"mask": torch.ones(num_tokens, dtype=torch.bool), "cu_seqlens": torch.tensor([0, num_tokens])}
    found = importance_weights(old_logp, rollout_logp, **batch, level="sequence", mode="truncate", low=0, high=9)
    gap = float(old_logp[0].double() - rollout_logp[0].double())
    assert float(found.weights[-1]) == pytest.approx(math.exp(num_tokens * gap), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "tokens"}, "importance level 'tokens': unknown; use token, sequence, geometric"),
        ({"mode": "clip"}, "importance mode 'clip': unknown; use truncate, mask"),
        ({"high": 0.0}, "high must be positive, got 0.0"),
        ({"low": 1.5}, "low must be between 0 and high .1.4., got 1.5"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        importance_weights(**random_batch(seed=0), **{"level": "token", "mode": "mask", **BOUNDS, **change})
