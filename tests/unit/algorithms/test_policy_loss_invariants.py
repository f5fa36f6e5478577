"""What holds for every policy loss: it does not depend on cuts or order, and what does not count adds nothing."""

import math

import pytest
import torch
from policy_loss_cases import AGGREGATION_CONSTANT, CASES, backward, random_batch

from rlmegatron.algorithms.aggregation import AGGREGATIONS, denominator_part, token_weights
from rlmegatron.algorithms.ratio import sequence_log_ratio

LENGTHS = [5, 0, 9, 1, 6, 40]
CUTS = [[[0], [1], [2], [3], [4], [5]], [[5, 0], [4, 3, 2, 1]], [[4, 2], [], [3, 0, 1, 5]], [[3, 5, 1, 0, 4, 2]]]
PER_TOKEN = ("logp", "old_logp", "advantages")

every_loss = pytest.mark.parametrize("name", CASES)


@every_loss
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_in_any_order_add_up_to_the_whole(name, aggregation):
    batch = random_batch(LENGTHS, seed=2, aggregation=aggregation)
    whole, whole_gradient, whole_stats = backward(CASES[name], batch)
    assert whole_gradient.abs().sum() > 0
    for cut in CUTS:
        parts = [backward(CASES[name], batch, members) for members in cut]
        assert float(sum(total for total, _, _ in parts)) == pytest.approx(float(whole), rel=1e-12, abs=1e-12)
        assert torch.allclose(sum(gradient for _, gradient, _ in parts), whole_gradient, rtol=1e-12, atol=1e-12)
        for key, stat in whole_stats.items():
            assert sum(stats[key].parts for _, _, stats in parts).equal(stat.parts)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_and_denominators_are_those_of_the_whole_batch(aggregation):
    batch = random_batch(LENGTHS, seed=2)
    mask, bounds = batch["mask"], batch["cu_seqlens"].tolist()
    whole = token_weights(mask, batch["cu_seqlens"], aggregation, constant=AGGREGATION_CONSTANT)
    for at in range(len(LENGTHS) + 1):
        cuts = (bounds[: at + 1], [bound - bounds[at] for bound in bounds[at:]])
        masks, cu_seqlens = (mask[: bounds[at]], mask[bounds[at] :]), [torch.tensor(cut) for cut in cuts]
        halves = [
            token_weights(m, cu, aggregation, constant=AGGREGATION_CONSTANT)
            for m, cu in zip(masks, cu_seqlens, strict=True)
        ]
        assert torch.cat(halves).equal(whole)
        counts = [denominator_part(m, cu, aggregation) for m, cu in zip(masks, cu_seqlens, strict=True)]
        assert sum(counts) == denominator_part(mask, batch["cu_seqlens"], aggregation)


@every_loss
def test_what_does_not_count_may_be_nan_and_changes_nothing(name):
    clean = random_batch(LENGTHS, seed=3)
    idle = clean["weights"] == 0
    dirty = {**clean, **{key: torch.where(idle, math.nan, clean[key]) for key in PER_TOKEN}}
    total, gradient, stats = backward(CASES[name], dirty)
    expected, expected_gradient, expected_stats = backward(CASES[name], clean)
    assert total.equal(expected) and gradient.equal(expected_gradient)
    assert (gradient[idle] == 0).all() and idle.any()
    assert all(stats[key].parts.equal(stat.parts) for key, stat in expected_stats.items())


@every_loss
@pytest.mark.parametrize("lengths", [[], [0], [3], [2, 0, 1]])
def test_a_batch_with_nothing_to_count_costs_nothing_even_if_it_holds_nan(name, lengths):
    batch = random_batch(lengths, seed=4)
    batch["mask"][:], batch["weights"][:] = False, 0.0
    batch |= {key: torch.full_like(batch[key], math.nan) for key in PER_TOKEN}
    total, gradient, stats = backward(CASES[name], batch)
    assert total.item() == 0.0 and gradient.tolist() == [0.0] * sum(lengths)
    assert all(stat.parts.tolist() == [0.0, 0.0] for stat in stats.values())


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in CASES for key in CASES[name].inputs if key not in ("mask", "cu_seqlens")]
)
def test_a_nan_at_a_token_that_counts_is_not_hidden(name, key):
    batch = random_batch([4], seed=5)
    batch["mask"][:], batch["weights"][:] = True, 1.0
    batch[key][1] = math.nan
    assert math.isnan(CASES[name](batch).total)


@every_loss
def test_one_token_is_a_batch(name):
    batch = random_batch([1], seed=0)
    batch["mask"][:], batch["weights"][:] = True, 0.25
    lists = {key: tensor.tolist() for key, tensor in batch.items()}
    expected, _ = CASES[name].slow(**lists, frozen=lists["logp"], **CASES[name].settings)
    assert CASES[name](batch).total.item() == pytest.approx(expected, rel=1e-12)


@every_loss
def test_an_answer_of_100_000_tokens_is_right_in_single_precision(name):
    """Against double precision on the same numbers, beside a short answer."""
    batch = random_batch([100_000, 3], seed=7, dtype=torch.float32)
    exact = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
    total, gradient, _ = backward(CASES[name], batch)
    expected, expected_gradient, _ = backward(CASES[name], exact)
    assert float(total) == pytest.approx(float(expected), rel=2e-5)
    assert torch.allclose(gradient.double(), expected_gradient, rtol=2e-4, atol=1e-12)


def test_the_log_ratio_of_a_long_answer_keeps_its_digits():
    """Added up in single precision, 100,000 times 0.1 is 9998.6."""
    log_ratio, counted = torch.full((100_000,), 0.1), torch.ones(100_000, dtype=torch.bool)
    found = sequence_log_ratio(log_ratio, counted, torch.tensor([0, 100_000]), mean=True)
    assert found.item() == pytest.approx(float(log_ratio[0]), rel=1e-12)
