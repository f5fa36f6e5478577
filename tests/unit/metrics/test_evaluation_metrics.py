"""Pass@k against every subset that there is, and the numbers of a set against a loop over its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest

from rlmegatron.metrics.evaluation import accuracy_metrics, pass_at_k, powers_of_two, sampled_metrics, standard_error
from rlmegatron.types import Prompt, Sample, SampleGroup


def group(number: int, rewards: Sequence[float], length: int = 2) -> SampleGroup:
    samples = (
        Sample(number, index, (1,) * length, (0.0,) * length, (0,) * length, "stop", "", reward)
        for index, reward in enumerate(rewards)
    )
    return SampleGroup(Prompt(number, (1,), "", {}, ""), tuple(samples))


def share_of_subsets_with_a_correct_answer(answers: Sequence[bool], k: int) -> Fraction:
    subsets = list(combinations(answers, k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets_of_k_answers_that_hold_a_correct_one(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            exact = share_of_subsets_with_a_correct_answer([number < c for number in range(n)], k)
            assert pass_at_k(num_samples=n, num_correct=c, k=k) == float(exact)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over all outcomes of n answers, each correct with chance p, is the chance that one of k is correct."""
    n, p = 7, Fraction(2, 9)
    for k in range(1, n + 1):
        mean = sum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(pass_at_k(num_samples=n, num_correct=c, k=k))
            for c in range(n + 1)
        )
        assert float(mean) == pytest.approx(float(1 - (1 - p) ** k), rel=1e-14)


def test_pass_at_k_of_many_answers_neither_overflows_nor_cancels() -> None:
    assert pass_at_k(num_samples=100_000, num_correct=1, k=1) == 1e-5
    one_minus_ratios = 1.0
    for i in range(4096 - 3 + 1, 4096 + 1):  # the product of the paper's own code
        one_minus_ratios *= 1 - 1024 / i
    found = pass_at_k(num_samples=4096, num_correct=3, k=1024)
    assert found == pytest.approx(1 - one_minus_ratios, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (0, 0, 1)])
def test_a_k_or_a_count_that_cannot_be_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {c} correct answers among {n}; k may be 1 to {n}"):
        pass_at_k(num_samples=n, num_correct=c, k=k)


def test_powers_of_two_end_at_the_last_that_fits() -> None:
    assert [powers_of_two(limit) for limit in (0, 1, 7, 8)] == [(), (1,), (1, 2, 4), (1, 2, 4, 8)]


SET = [group(0, [1, 0, 0, 1]), group(1, [0, 0, 0, 0]), group(2, [0.5, 0.4, 1, 1], length=5)]


def test_numbers_of_a_set_are_what_a_loop_over_its_answers_says() -> None:
    """Correct are 2, 0 and 3 of 4: a reward at the threshold counts."""
    assert accuracy_metrics(SET, kind="sampled", threshold=0.5) == pytest.approx(
        {
            "num_prompts": 3,
            "sampled_accuracy": 5 / 12,
            "sampled_reward": (1 + 1 + 0.5 + 0.4 + 1 + 1) / 12,
            "sampled_length": (4 * 2 + 4 * 2 + 4 * 5) / 12,
            # Shares 1/2, 0, 3/4; their mean is 5/12 and their sample variance 7/48.
            "sampled_stderr": math.sqrt(7 / 48 / 3),
        }
    )


def test_pass_and_avg_of_a_set_are_means_over_its_prompts() -> None:
    found = sampled_metrics(SET, num_samples=4, threshold=0.5, pass_at=[3, 1])
    expected = {"avg_at_4": 5 / 12, "pass_at_1": 5 / 12, "pass_at_3": (1 + 0 + 1) / 3}
    assert found == pytest.approx(expected) and list(found) == list(expected)


def test_without_a_choice_k_goes_through_the_powers_of_two() -> None:
    names = list(sampled_metrics(SET, num_samples=4, threshold=0.5, pass_at=()))
    assert names == ["avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4"]


def test_the_order_of_prompts_changes_no_bit() -> None:
    groups = [group(number, [float(bit) for bit in f"{number * 37 % 64:06b}"]) for number in range(50)]
    for metrics in (
        lambda order: sampled_metrics(order, num_samples=6, threshold=0.5, pass_at=()),
        lambda order: accuracy_metrics(order, kind="sampled", threshold=0.5),
    ):
        assert metrics(groups) == metrics(groups[::-1])


def test_one_prompt_has_no_standard_error() -> None:
    assert standard_error([0.5]) is None
    assert "greedy_stderr" not in accuracy_metrics([group(0, [1])], kind="greedy", threshold=0.5)
