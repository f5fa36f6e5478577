"""Balance of experts against loops over sequences, tokens and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlmegatron.algorithms.expert_balance import (
    bias_step,
    choices_per_sequence,
    max_violation,
    sequence_balance,
    variation,
)

E, K = 6, 2
LENGTHS = [3, 1, 5]


def made(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scores [T E], best [T E], sequence [T], lengths [N]) of sequences laid end to end and two tokens of filler."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(sum(LENGTHS) + 2, E, generator=generator)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(K).indices, True)
    numbers = torch.tensor([0, 1, 2, 3]).repeat_interleave(torch.tensor([*LENGTHS, 2]))
    return scores, best, numbers, torch.tensor(LENGTHS)


def by_loop(scores: Tensor, best: Tensor, sequence: Tensor) -> Tensor:
    """eq. 17 to 20, one sequence, expert and token after the other."""
    total = torch.zeros(())
    for number, length in enumerate(LENGTHS):
        tokens = [t for t in range(len(scores)) if sequence[t] == number]
        for expert in range(E):
            frequency = E / (K * length) * sum(bool(best[t, expert]) for t in tokens)
            mean_share = sum((scores[t, expert] / scores[t].sum() for t in tokens), torch.zeros(())) / length
            total = total + frequency * mean_share
    return total


def balance(scores: Tensor, best: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    choices = choices_per_sequence(best, sequence, len(lengths))
    return sequence_balance(scores, sequence, lengths, choices, top_k=K)


def test_balance_and_its_gradient_are_those_of_a_loop() -> None:
    scores, best, sequence, lengths = made()
    found, expected = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    total, reference = balance(found, best, sequence, lengths), by_loop(expected, best, sequence)
    torch.testing.assert_close(total, reference)
    total.backward()
    reference.backward()
    torch.testing.assert_close(found.grad, expected.grad)


def test_parts_of_a_sequence_add_up_to_the_whole() -> None:
    """As under sequence parallelism: each rank has some tokens, all know the choices of the whole."""
    scores, best, sequence, lengths = made()
    choices = choices_per_sequence(best, sequence, len(lengths))
    parts = [
        sequence_balance(scores[rows], sequence[rows], lengths, choices, top_k=K)
        for rows in (slice(0, 4), slice(4, 5), slice(5, None))
    ]
    torch.testing.assert_close(sum(parts), balance(scores, best, sequence, lengths))


def test_what_counts_nowhere_may_be_nan() -> None:
    scores, best, sequence, lengths = made()
    broken = scores.clone()
    broken[-2:] = torch.nan
    broken.requires_grad_()
    total = balance(broken, best, sequence, lengths)
    torch.testing.assert_close(total, balance(scores, best, sequence, lengths))
    total.backward()
    assert broken.grad is not None and broken.grad.isfinite().all() and (broken.grad[-2:] == 0).all()


def test_an_even_sequence_is_worth_1_and_one_that_uses_one_expert_as_much_as_there_are() -> None:
    even = torch.eye(E)
    sequence, lengths = torch.zeros(E, dtype=torch.int64), torch.tensor([E])
    choices = choices_per_sequence(even.bool(), sequence, 1)
    assert float(sequence_balance(even, sequence, lengths, choices, top_k=1)) == pytest.approx(1)
    one = torch.eye(E)[[0] * E]
    choices = choices_per_sequence(one.bool(), sequence, 1)
    assert float(sequence_balance(one, sequence, lengths, choices, top_k=1)) == pytest.approx(E)


def test_scores_that_vanish_give_no_nan() -> None:
    scores = torch.zeros(2, E, requires_grad=True)
    sequence_balance(scores, torch.zeros(2, dtype=torch.int64), torch.tensor([2]), torch.ones(1, E), top_k=K).backward()
    assert scores.grad is not None and scores.grad.isfinite().all()


def test_load_in_numbers() -> None:
    """Loads 6 2 1 3 have the mean 3: the first is 100 % above it, and they deviate by the root of 14 / 4."""
    load = torch.tensor([[6.0, 2.0, 1.0, 3.0], [3.0, 3.0, 3.0, 3.0]])
    assert max_violation(load).tolist() == [1.0, 0.0]
    torch.testing.assert_close(variation(load), torch.tensor([3.5**0.5 / 3, 0.0]))
    torch.testing.assert_close(bias_step(load, 0.1), torch.tensor([[-0.1, 0.1, 0.1, 0.0], [0.0] * 4]))
