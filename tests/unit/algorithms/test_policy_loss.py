"""Each policy loss against a loop over tokens, difference quotients of that loop, and numbers worked out by hand."""

import math

import pytest
import torch
from policy_loss_cases import CASES, backward, random_batch

from rlmegatron.algorithms.policy_loss import cispo, gspo, ppo_clip

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LENGTHS = [7, 0, 30, 1, 12, 25]


def slow(case, batch, logp=None):
    lists = {name: tensor.tolist() for name, tensor in batch.items()}
    return case.slow(**{**lists, "logp": logp or lists["logp"]}, frozen=lists["logp"], **case.settings)


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_statistics_are_what_a_loop_says(name):
    batch = random_batch(LENGTHS, seed=0)
    term = CASES[name](batch)
    total, counts = slow(CASES[name], batch)
    num_counted = int((batch["weights"] > 0).sum())
    assert term.total.item() == pytest.approx(total, rel=1e-12)
    assert {key: stat.parts.tolist() for key, stat in term.stats.items()} == {
        key: [count, num_counted] for key, count in counts.items()
    }
    assert all(0 < count < num_counted for count in counts.values())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_difference_quotients_of_the_loop(name):
    batch = random_batch([4, 11, 0, 1, 9], seed=1)
    _, gradient, _ = backward(CASES[name], batch)
    step, expected = 1e-6, []
    for i in range(len(gradient)):
        ends = []
        for sign in (1, -1):
            moved = batch["logp"].tolist()
            moved[i] += sign * step
            ends.append(slow(CASES[name], batch, logp=moved)[0])
        expected.append((ends[0] - ends[1]) / (2 * step))
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert (gradient != 0).sum() > 5


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
    logp = doubles(math.log(ratio)).requires_grad_()
    term = ppo_clip(logp=logp, old_logp=doubles(0), advantages=doubles(advantage), weights=doubles(1), **CLIP)
    term.total.backward()
    assert term.total.item() == pytest.approx(loss)
    assert logp.grad is not None and float(logp.grad) == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "bounded"),
    [
        (4.0, -2.0, 6.0, 0.0, 1.0),  # 8 without the bound
        (2.0, -2.0, 4.0, 4.0, 0.0),
        (0.5, -2.0, 1.6, 0.0, 0.0),  # the usual clip
        (4.0, 2.0, -2.6, 0.0, 0.0),  # no bound where the advantage is positive
    ],
)
def test_hand_worked_cases_of_the_dual_clip(ratio, advantage, loss, slope, bounded):
    logp = doubles(math.log(ratio)).requires_grad_()
    inputs = {"logp": logp, "old_logp": doubles(0), "advantages": doubles(advantage), "weights": doubles(1)}
    term = ppo_clip(**inputs, **CLIP, dual_clip=3.0)
    term.total.backward()
    assert term.total.item() == pytest.approx(loss)
    assert logp.grad is not None and float(logp.grad) == pytest.approx(slope)
    assert term.stats["dual_clip_fraction"].parts.tolist() == [bounded, 1.0]
    assert "dual_clip_fraction" not in ppo_clip(**inputs, **CLIP).stats


def test_a_dual_clip_that_would_bound_an_unmoved_policy_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        ppo_clip(logp=one, old_logp=one, advantages=one, weights=one, **CLIP, dual_clip=1.0)


@pytest.mark.parametrize(
    ("advantage", "total", "gradient", "clipped"),
    [
        # The tokens' ratios are 1 and 1.44, the answer's is 1.2: each token would be clipped otherwise by PPO.
        (1.0, -2 * 1.2, [-1.2, -1.2], 0.0),
        (-1.0, 2 * 1.2, [1.2, 1.2], 0.0),
        # And 0.6 for an answer of 0.36 and 1.
        (3.0, -6 * 0.6, [-1.8, -1.8], 0.0),
        (-3.0, 6 * 0.8, [0.0, 0.0], 2.0),
    ],
)
def test_hand_worked_answers_of_gspo(advantage, total, gradient, clipped):
    logp = doubles(0.0, math.log(1.44 if abs(advantage) == 1 else 0.36)).requires_grad_()
    term = gspo(
        logp=logp,
        old_logp=doubles(0, 0),
        advantages=doubles(advantage, advantage),
        weights=doubles(1, 1),
        mask=torch.tensor([True, True]),
        cu_seqlens=torch.tensor([0, 2]),
        **CLIP,
    )
    term.total.backward()
    assert term.total.item() == pytest.approx(total)
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(gradient)
    assert term.stats["clip_fraction"].parts.tolist() == [clipped, 2.0]


@pytest.mark.parametrize("without", ["weights", "mask"])
def test_gspo_leaves_a_token_without_weight_or_mask_out_of_the_mean_as_of_the_sum(without):
    batch = random_batch([5, 3], seed=3)
    batch["mask"][:], batch["weights"][:] = True, 0.5
    batch[without][2] = 0
    fewer = {name: torch.cat([tensor[:2], tensor[3:]]) for name, tensor in batch.items() if name != "cu_seqlens"}
    fewer["cu_seqlens"] = torch.tensor([0, 4, 7])
    assert CASES["gspo"](batch).total.item() == pytest.approx(CASES["gspo"](fewer).total.item(), rel=1e-12)
    assert backward(CASES["gspo"], batch)[1][2] == 0.0


def test_gspo_with_answers_of_one_token_is_ppo():
    batch = random_batch([1] * 20, seed=4)
    of_answers = gspo(**batch, **CLIP)
    of_tokens = ppo_clip(**{name: batch[name] for name in CASES["ppo_clip"].inputs}, **CLIP)
    assert of_answers.total.item() == pytest.approx(of_tokens.total.item(), rel=1e-12)
    assert of_answers.stats["clip_fraction"].parts.equal(of_tokens.stats["clip_fraction"].parts)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.8), (0.9, 0.9), (1.2, 1.2), (50.0, 1.3)])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_cispo_bounds_a_tokens_gradient_and_never_silences_it(ratio, weight, advantage):
    logp = doubles(math.log(ratio) - 1).requires_grad_()
    term = cispo(logp=logp, old_logp=doubles(-1), advantages=doubles(advantage), weights=doubles(1), **CLIP)
    term.total.backward()
    assert term.total.item() == pytest.approx(-weight * advantage * (math.log(ratio) - 1))
    assert logp.grad is not None and float(logp.grad) == pytest.approx(-weight * advantage)


@pytest.mark.parametrize("log_ratio", [-1000.0, -50.0, 50.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_far_policies_give_finite_losses_and_gradients_of_the_right_value(name, log_ratio, advantage):
    """Sequences of one token: one far away, one unmoved. CISPO and REINFORCE are linear in logp itself."""
    clip, far = CASES[name].settings, log_ratio > 0
    batch = {
        "logp": doubles(log_ratio - 1, -1),
        "old_logp": doubles(-1, -1),
        "advantages": doubles(advantage, advantage),
        "weights": doubles(1, 1),
        "mask": torch.tensor([True, True]),
        "cu_seqlens": torch.tensor([0, 1, 2]),
    }
    total, gradient, stats = backward(CASES[name], batch)
    if name == "reinforce":
        expected, slope = -advantage * (log_ratio - 2), -advantage
    else:
        nearest = 1 + clip["clip_high"] if far else 1 - clip["clip_low"]
        if name == "cispo":
            expected, slope = -advantage * (nearest * (log_ratio - 1) - 1), -advantage * nearest
        else:
            cut = math.exp(math.copysign(20, log_ratio))
            loss = max(-advantage * cut, -advantage * nearest)
            if advantage < 0:
                loss = min(loss, -advantage * clip.get("dual_clip", math.inf))
            expected, slope = loss - advantage, 0.0
    assert float(total) == pytest.approx(expected)
    assert gradient.tolist() == pytest.approx([slope, -advantage])
    assert all(stat.parts.isfinite().all() for stat in stats.values())
