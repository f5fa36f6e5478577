"""The clipped value loss against a loop over tokens, finite differences, and its edges."""

import math

import pytest
import torch

from rlmegatron.algorithms.value_loss import clipped_value


def slow_value_loss(values, old_values, returns, weights, value_clip):
    """TRL's PPOTrainer, token by token; returns the sum and how many tokens the clip decided."""
    total, clipped_tokens = 0.0, 0
    for value, old, target, weight in zip(values, old_values, returns, weights, strict=True):
        if weight == 0:
            continue
        near = value if value_clip is None else min(max(value, old - value_clip), old + value_clip)
        loss1, loss2 = (value - target) ** 2, (near - target) ** 2
        total += weight * 0.5 * max(loss1, loss2)
        clipped_tokens += loss2 > loss1
    return total, clipped_tokens


def random_batch(num_tokens, seed):
    rng = torch.Generator().manual_seed(seed)
    names = ("values", "old_values", "returns")
    batch = {name: torch.randn(num_tokens, generator=rng, dtype=torch.float64) for name in names}
    weights = torch.rand(num_tokens, generator=rng, dtype=torch.float64)
    return {**batch, "weights": weights * (weights > 0.3)}


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_loss_and_statistics_are_what_a_loop_says(value_clip):
    batch = random_batch(150, seed=0)
    term = clipped_value(**batch, value_clip=value_clip)
    total, clipped_tokens = slow_value_loss(**{k: v.tolist() for k, v in batch.items()}, value_clip=value_clip)
    assert term.total.item() == pytest.approx(total, rel=1e-12)
    assert term.stats["clip_fraction"].parts.tolist() == [clipped_tokens, int((batch["weights"] > 0).sum())]
    assert (clipped_tokens > 0) == (value_clip is not None)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (0.0, 0.5, -1.0, 0.0),  # unmoved: at the first update of a batch
        (0.25, 0.28125, -0.75, 0.0),  # on its way
        (0.75, 0.125, 0.0, 1.0),  # moved further than 0.5: counted as 0.5, and no more gradient
        (1.75, 0.28125, 0.75, 0.0),  # beyond the return and further off than 0.5 is: comes back
        (-1.0, 2.0, -2.0, 0.0),  # moved the wrong way: comes back, and the clip does not soften it
    ],
)
def test_hand_worked_cases_of_the_clip(value, loss, slope, clipped):
    """The old value is 0, the return 1, the clip 0.5."""
    one = torch.ones(1, dtype=torch.float64)
    values = (value * one).requires_grad_()
    term = clipped_value(values=values, old_values=0 * one, returns=one, weights=one, value_clip=0.5)
    term.total.backward()
    assert term.total.item() == loss
    assert values.grad is not None and float(values.grad) == slope
    assert term.stats["clip_fraction"].parts.tolist() == [clipped, 1.0]


def test_micro_batches_in_any_order_add_up_to_the_whole():
    batch = random_batch(60, seed=3)
    whole = clipped_value(**batch, value_clip=0.2)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    first, second = (
        clipped_value(**{name: tensor[at] for name, tensor in batch.items()}, value_clip=0.2)
        for at in (order[:13], order[13:])
    )
    assert (first.total + second.total).item() == pytest.approx(whole.total.item(), rel=1e-12)
    for name, stat in whole.stats.items():
        assert first.stats[name].merge(second.stats[name]).parts.tolist() == pytest.approx(stat.parts.tolist())


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_gradients_match_finite_differences(value_clip):
    batch = random_batch(40, seed=2)
    values = batch.pop("values").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_value(values=x, **batch, value_clip=value_clip).total, (values,))


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_batch_with_nothing_to_count_costs_nothing_even_if_it_holds_nan(num_tokens):
    values = torch.full((num_tokens,), math.nan, requires_grad=True)
    rest = torch.full((num_tokens,), math.nan)
    term = clipped_value(values=values, old_values=rest, returns=rest, weights=torch.zeros(num_tokens), value_clip=0.2)
    term.total.backward()
    assert term.total.item() == 0.0
    assert values.grad is not None and values.grad.tolist() == [0.0] * num_tokens
    assert all(stat.parts.tolist() == [0.0] * len(stat.parts) for stat in term.stats.values())
