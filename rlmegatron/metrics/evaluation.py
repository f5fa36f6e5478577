"""The numbers of one evaluation: accuracy, length, avg@n and pass@k from judged answers.

In: the groups of a whole set, and how many answers make pass@k. Out: plain floats by name. Must never sample, judge or
communicate: whoever calls has all groups of the set.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from rlmegatron.types import SampleGroup


def pass_at_k(*, num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the share of the subsets of k among n answers that hold one of the c correct answers.

    The unbiased estimate of the chance that one of k new answers is correct (Chen et al. 2021, arXiv 2107.03374,
    eq. 1). In whole numbers, so that nothing overflows or cancels and the result is rounded once. Raises ValueError
    for k > n.

    >>> pass_at_k(num_samples=4, num_correct=2, k=2)  # 1 of the 6 pairs holds none
    0.8333333333333334
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct answers among {num_samples}; k may be 1 to {num_samples}")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to `limit`.

    >>> powers_of_two(6)
    (1, 2, 4)
    """
    return tuple(1 << exponent for exponent in range(limit.bit_length()))


def standard_error(values: Sequence[float]) -> float | None:
    """That of the mean of independent values: s / sqrt(N) with the sample's s; None for fewer than two values.

    With one value a prompt this is the error clustered by prompt (Miller 2024, arXiv 2411.00640, section 2.2): answers
    to one prompt are not independent, prompts are.

    >>> standard_error([0.0, 1.0, 0.5])
    0.28867513459481287
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def accuracy_metrics(groups: Sequence[SampleGroup], *, kind: str, threshold: float) -> dict[str, float]:
    """`num_prompts`, and over all answers `<kind>_accuracy`, `_reward`, `_length` (tokens) and `_stderr`.

    kind: 'greedy' or 'sampled'. threshold: the smallest reward of a correct answer. `_stderr` is that of the accuracy
    over prompts, and absent for one prompt alone.
    """
    samples, counts = [sample for group in groups for sample in group.samples], _num_correct(groups, threshold)
    found = {
        "num_prompts": float(len(groups)),
        f"{kind}_accuracy": sum(counts) / len(samples),
        f"{kind}_reward": math.fsum(_reward(sample.reward) for sample in samples) / len(samples),
        f"{kind}_length": sum(len(sample.token_ids) for sample in samples) / len(samples),
    }
    error = standard_error([count / len(group.samples) for count, group in zip(counts, groups, strict=True)])
    return found if error is None else {**found, f"{kind}_stderr": error}


def sampled_metrics(
    groups: Sequence[SampleGroup], *, num_samples: int, threshold: float, pass_at: Collection[int]
) -> dict[str, float]:
    """`avg_at_<n>`, and `pass_at_<k>` for each k of `pass_at`: means over prompts, each with `num_samples` answers.

    pass_at: none means the powers of two up to `num_samples`. Raises ValueError for a k above `num_samples`.
    """
    assert all(len(group.samples) == num_samples for group in groups), f"every prompt has {num_samples} answers"
    counts = Counter(_num_correct(groups, threshold))
    found = {f"avg_at_{num_samples}": sum(c * times for c, times in counts.items()) / (num_samples * len(groups))}
    for k in sorted(pass_at or powers_of_two(num_samples)):
        chances = (pass_at_k(num_samples=num_samples, num_correct=c, k=k) * times for c, times in counts.items())
        found[f"pass_at_{k}"] = math.fsum(chances) / len(groups)
    return found


def _num_correct(groups: Sequence[SampleGroup], threshold: float) -> list[int]:
    """Of each prompt."""
    return [sum(_reward(sample.reward) >= threshold for sample in group.samples) for group in groups]


def _reward(reward: float | None) -> float:
    assert reward is not None, "answers are judged before they are counted"
    return reward
