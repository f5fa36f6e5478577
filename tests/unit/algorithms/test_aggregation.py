"""Weights and denominators make the loss the mean that their names promise, however the batch is cut."""

import math

import pytest
import torch

from rlmegatron.algorithms.aggregation import AGGREGATIONS, denominator_part, token_weights

# Three sequences: 2 of 3 tokens count, none of 2, 1 of 1.
MASK = torch.tensor([False, True, True, False, False, True])
CU_SEQLENS = torch.tensor([0, 3, 5, 6])
LOSS = torch.tensor([100.0, 1.0, 3.0, 100.0, 100.0, 5.0])


def mean(aggregation, constant=None):
    weights = token_weights(MASK, CU_SEQLENS, aggregation, constant=constant)
    return float((weights * LOSS).sum()) / denominator_part(MASK, CU_SEQLENS, aggregation)


def test_token_mean_weighs_every_counted_token_alike():
    assert mean("token_mean") == (1 + 3 + 5) / 3


def test_the_others_weigh_every_answer_alike_and_an_empty_answer_not_at_all():
    assert mean("seq_mean_token_mean") == ((1 + 3) / 2 + 5) / 2
    assert mean("seq_mean_token_sum") == ((1 + 3) + 5) / 2
    assert mean("seq_mean_token_sum_norm", constant=8) == ((1 + 3) / 8 + 5 / 8) / 2


def test_the_constant_is_read_by_one_aggregation_only():
    for aggregation in AGGREGATIONS[:-1]:
        assert mean(aggregation, constant=8) == mean(aggregation)


@pytest.mark.parametrize("constant", [None, 0, -1, math.nan])
def test_an_aggregation_that_divides_by_a_constant_needs_one(constant):
    with pytest.raises(ValueError, match="'seq_mean_token_sum_norm' divides by a positive constant, got"):
        token_weights(MASK, CU_SEQLENS, "seq_mean_token_sum_norm", constant=constant)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_mean_does_not_depend_on_micro_batches_or_order(aggregation):
    rng = torch.Generator().manual_seed(0)
    sequences = []
    for length in (4, 1, 0, 7, 3):
        sequences.append((torch.rand(length, generator=rng) < 0.6, torch.randn(length, generator=rng).double()))
    results = []
    for cut in ([[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[3, 1], [], [4, 2, 0]]):
        total, count = 0.0, 0.0
        for members in cut:
            masks = [sequences[i][0] for i in members]
            cu_seqlens = torch.tensor([0, *[len(m) for m in masks]]).cumsum(0)
            mask = torch.cat([*masks, torch.zeros(0, dtype=torch.bool)])
            loss = torch.cat([*[sequences[i][1] for i in members], torch.zeros(0).double()])
            total += float((token_weights(mask, cu_seqlens, aggregation, constant=5) * loss).sum())
            count += denominator_part(mask, cu_seqlens, aggregation)
        results.append((round(total, 5), count))
    assert results[0] == results[1] == results[2]
    assert results[0][1] > 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_with_nothing_to_count_weighs_nothing(aggregation):
    mask = torch.zeros(3, dtype=torch.bool)
    assert token_weights(mask, torch.tensor([0, 3]), aggregation, constant=5).tolist() == [0.0, 0.0, 0.0]
    assert denominator_part(mask, torch.tensor([0, 3]), aggregation) == 0.0


def test_an_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="aggregation 'token-mean': unknown; use token_mean, seq_mean_token_mean"):
        token_weights(MASK, CU_SEQLENS, "token-mean")
