"""PPO's clipped loss against a loop over tokens, finite differences, cuts of the batch, and its edges."""

import math

import pytest
import torch

from rlmegatron.algorithms.aggregation import AGGREGATIONS, denominator_part, token_weights
from rlmegatron.algorithms.policy_loss import ppo_clip

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def slow_ppo(logp, old_logp, advantages, weights, clip_low, clip_high):
    """TRL's PPOTrainer, token by token; returns the sum and how many tokens the clip decided."""
    total, clipped_tokens = 0.0, 0
    for new, old, advantage, weight in zip(logp, old_logp, advantages, weights, strict=True):
        if weight == 0:
            continue
        ratio = math.exp(new - old)
        loss1 = -advantage * ratio
        loss2 = -advantage * min(max(ratio, 1 - clip_low), 1 + clip_high)
        total += weight * max(loss1, loss2)
        clipped_tokens += loss2 > loss1
    return total, clipped_tokens


def random_batch(num_tokens, seed, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    logp = -torch.rand(num_tokens, generator=rng, dtype=dtype) * 3
    old_logp = logp + 0.5 * torch.randn(num_tokens, generator=rng, dtype=dtype)
    advantages = torch.randn(num_tokens, generator=rng, dtype=dtype)
    weights = (torch.rand(num_tokens, generator=rng) < 0.7).to(dtype) * torch.rand(num_tokens, generator=rng)
    return {"logp": logp, "old_logp": old_logp, "advantages": advantages, "weights": weights.to(dtype)}


def mean_of(stat):
    return float(stat.parts[0] / stat.parts[1])


def test_loss_and_statistics_are_what_a_loop_says():
    batch = random_batch(200, seed=0)
    term = ppo_clip(**batch, **CLIP)
    lists = {name: tensor.tolist() for name, tensor in batch.items()}
    total, clipped_tokens = slow_ppo(**lists, **CLIP)
    assert term.total.item() == pytest.approx(total, rel=1e-12)
    counted = [i for i, w in enumerate(lists["weights"]) if w > 0]
    log_ratio = [lists["logp"][i] - lists["old_logp"][i] for i in counted]
    assert term.stats["clip_fraction"].parts.tolist() == [clipped_tokens, len(counted)]
    assert 0 < clipped_tokens < len(counted)
    ratios = [math.exp(d) for d in log_ratio]
    assert mean_of(term.stats["ratio_mean"]) == pytest.approx(sum(ratios) / len(ratios))
    assert float(term.stats["ratio_max"].parts) == pytest.approx(max(ratios))
    assert mean_of(term.stats["approx_kl_k1"]) == pytest.approx(-sum(log_ratio) / len(log_ratio))
    expected_k3 = sum(r - 1 - d for r, d in zip(ratios, log_ratio, strict=True)) / len(ratios)
    assert mean_of(term.stats["approx_kl"]) == pytest.approx(expected_k3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # already likelier than allowed: no more credit
        (0.5, 2.0, -1.0, -1.0),  # may come back
        (0.5, -2.0, 1.6, 0.0),  # already rarer than allowed
        (1.5, -2.0, 3.0, 3.0),  # may come back, and the clip does not soften it
    ],
)
def test_hand_worked_cases_of_the_clip(ratio, advantage, loss, slope):
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    term = ppo_clip(
        logp=logp,
        old_logp=torch.zeros(1, dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        **CLIP,
    )
    term.total.backward()
    assert term.total.item() == pytest.approx(loss)
    assert logp.grad is not None and float(logp.grad) == pytest.approx(slope)


def test_gradients_match_finite_differences():
    batch = random_batch(40, seed=1)
    logp = batch.pop("logp").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_clip(logp=x, **batch, **CLIP).total, (logp,))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_micro_batches_or_order(aggregation):
    lengths = [5, 0, 9, 1, 6]
    batch = random_batch(sum(lengths), seed=2)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    mask = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(5)) < 0.6

    def gradient(cut):
        logp = batch["logp"].clone().requires_grad_()
        total, count, clipped = torch.zeros(()), 0.0, 0.0
        for members in cut:
            spans = [torch.arange(starts[i], starts[i + 1]) for i in members]
            at = torch.cat([*spans, torch.zeros(0, dtype=torch.int64)])
            cu_seqlens = torch.tensor([0, *[lengths[i] for i in members]]).cumsum(0)
            weights = token_weights(mask[at], cu_seqlens, aggregation)
            term = ppo_clip(
                logp=logp[at],
                old_logp=batch["old_logp"][at],
                advantages=batch["advantages"][at],
                weights=weights,
                **CLIP,
            )
            total = total + term.total
            count += denominator_part(mask[at], cu_seqlens, aggregation)
            clipped += float(term.stats["clip_fraction"].parts[0])
        (total / count).backward()
        assert logp.grad is not None
        return logp.grad, clipped

    whole, whole_clipped = gradient([[0, 1, 2, 3, 4]])
    assert whole.abs().sum() > 0
    for cut in ([[0], [1], [2], [3], [4]], [[4, 2], [], [3, 0, 1]]):
        parts, parts_clipped = gradient(cut)
        assert torch.allclose(whole, parts, rtol=1e-6, atol=1e-12)
        assert parts_clipped == whole_clipped


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_batch_with_nothing_to_count_costs_nothing_even_if_it_holds_nan(num_tokens):
    logp = torch.full((num_tokens,), math.nan, requires_grad=True)
    term = ppo_clip(
        logp=logp,
        old_logp=torch.full((num_tokens,), -math.inf),
        advantages=torch.full((num_tokens,), math.nan),
        weights=torch.zeros(num_tokens),
        **CLIP,
    )
    term.total.backward()
    assert term.total.item() == 0.0
    assert logp.grad is not None and logp.grad.tolist() == [0.0] * num_tokens
    assert term.stats["clip_fraction"].parts.tolist() == [0.0, 0.0]
    assert term.stats["ratio_max"].parts.tolist() == [-math.inf]


@pytest.mark.parametrize("log_ratio", [-1000.0, -50.0, 50.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_far_policies_give_finite_losses_and_gradients(log_ratio, advantage):
    logp = torch.tensor([log_ratio, 0.0], requires_grad=True)
    zeros = torch.zeros(2)
    term = ppo_clip(logp=logp, old_logp=zeros, advantages=torch.full((2,), advantage), weights=torch.ones(2), **CLIP)
    term.total.backward()
    assert term.total.isfinite() and logp.grad is not None and logp.grad.isfinite().all()
    assert float(logp.grad[1]) == -advantage
    assert all(stat.parts.isfinite().all() for stat in term.stats.values())


def test_a_nan_at_a_token_that_counts_is_not_hidden():
    one = torch.ones(1)
    term = ppo_clip(logp=torch.tensor([math.nan]), old_logp=one, advantages=one, weights=one, **CLIP)
    assert math.isnan(term.total)
