"""Advantages by group against slow loops, against numbers worked out by hand, and at their edges."""

import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.group import gpg, grpo, opo, reinforce_pp_baseline, rloo


def on_own_lengths(rewards, group_ids):
    return opo(rewards, group_ids, 1 + (torch.arange(rewards.shape[0]) * 7) % 5)


PLAIN = {
    "grpo": partial(grpo, normalize_std=True),
    "dr_grpo": partial(grpo, normalize_std=False),
    "rloo": rloo,
    "opo": on_own_lengths,
    "gpg": gpg,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}
every_estimator = pytest.mark.parametrize("estimator", PLAIN.values(), ids=PLAIN)


def slow(rewards, group_ids, lengths, name):
    """All advantages from their definitions, one sample at a time."""
    samples = list(zip(rewards, group_ids, lengths, strict=True))
    useful = sum(len({r for r, other, _ in samples if other == g}) > 1 for _, g, _ in samples)
    advantages = []
    for i, (reward, group, _) in enumerate(samples):
        members = [(r, n) for r, g, n in samples if g == group]
        scores, tokens = [r for r, _ in members], sum(n for _, n in members)
        if len(set(scores)) == 1 or (name == "opo" and tokens == 0):
            advantages.append(0.0)
            continue
        mean = statistics.fmean(scores)
        if name == "rloo":
            others = [r for j, (r, g, _) in enumerate(samples) if g == group and j != i]
            advantages.append(reward - statistics.fmean(others))
        elif name == "opo":
            advantages.append(reward - math.fsum(r * n for r, n in members) / tokens)
        elif name == "gpg":
            advantages.append((reward - mean) * len(samples) / useful)
        else:
            scale = statistics.stdev(scores) + 1e-6 if name == "grpo" else 1.0
            advantages.append((reward - mean) / scale)
    return advantages


@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from([0.0, 1.0, 0.1]), st.floats(-10, 10, width=32)),
            st.sampled_from([-(2**63), -1, 0, 5, 2**63 - 1]),
            st.integers(0, 4),
        ),
        max_size=16,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_order_of_any_groups_is_what_a_loop_says(samples):
    rewards, groups, lengths = ([sample[i] for sample in samples] for i in range(3))
    inputs = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)
    estimators = PLAIN | {"opo": partial(opo, lengths=torch.tensor(lengths, dtype=torch.int64))}
    for name, estimator in estimators.items():
        expected = slow(rewards, groups, lengths, name)
        assert estimator(*inputs).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9), name


def test_hand_worked_group():
    # Mean 0.25, squared deviations .5625 + 3 * .0625 = .75, over n - 1 = 3: std 0.5.
    rewards, group_ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5])
    assert grpo(rewards, group_ids, normalize_std=True).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=3e-6)
    assert reinforce_pp_baseline(rewards, group_ids).tolist() == [0.75, -0.25, -0.25, -0.25]
    # 1 against the others' 0; 0 against a mean of 1/3.
    assert rloo(rewards, group_ids).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    # 10 of 40 tokens earned the reward.
    lengths = torch.tensor([10, 5, 5, 20])
    assert opo(rewards, group_ids, lengths).tolist() == [0.75, -0.25, -0.25, -0.25]
    # 16 of 40 did.
    lengths = torch.tensor([16, 8, 0, 16])
    assert opo(rewards, group_ids, lengths).tolist() == pytest.approx([0.6, -0.4, -0.4, -0.4])


def test_gpg_scales_by_samples_in_groups_that_differ_not_by_rewards_that_are_not_0():
    rewards, group_ids = torch.tensor([2.0, 1.0, 4.0, 4.0, 4.0, 9.0]), torch.tensor([0, 0, 1, 1, 1, 2])
    assert gpg(rewards, group_ids).tolist() == [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]
    assert gpg(rewards - 4, group_ids).tolist() == [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]


def test_opo_of_equal_lengths_is_the_plain_group_mean():
    rewards, group_ids = torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    advantages = opo(rewards, group_ids, torch.full((12,), 3))
    assert torch.allclose(advantages, reinforce_pp_baseline(rewards, group_ids))


def test_opo_gives_a_group_of_empty_answers_nothing_and_empty_answers_no_say():
    rewards, group_ids = torch.tensor([1.0, 0.0, 1.0, 0.0, 8.0]), torch.tensor([0, 0, 1, 1, 1])
    advantages = opo(rewards, group_ids, torch.tensor([0, 0, 2, 2, 0]))
    assert advantages.tolist() == [0.0, 0.0, 0.5, -0.5, 7.5]


def test_opo_names_a_negative_length():
    with pytest.raises(ValueError, match=r"length of sample 1 \(group 3\) is -2"):
        opo(torch.ones(2), torch.tensor([3, 3]), torch.tensor([1, -2]))


@every_estimator
def test_a_permutation_of_the_batch_permutes_the_advantages_to_the_last_bit(estimator):
    """Members of a group stand far apart, and sums of tenths round differently in different orders."""
    rng = torch.Generator().manual_seed(3)
    rewards, groups = torch.randint(0, 10, (60,), generator=rng).double() / 10, torch.arange(60) % 7
    lengths = torch.randint(0, 50, (60,), generator=rng)
    inputs = (rewards, groups, lengths) if estimator is on_own_lengths else (rewards, groups)
    function = opo if estimator is on_own_lengths else estimator
    straight = function(*inputs)
    for _ in range(20):
        order = torch.randperm(60, generator=rng)
        assert torch.equal(function(*(x[order] for x in inputs)), straight[order])


@every_estimator
def test_groups_are_told_apart_by_id_alone(estimator):
    """Two prompts of the same text have different ids and must not be compared with each other."""
    rewards = torch.tensor([0.0, 10.0, 1.0, 11.0])
    advantages = estimator(rewards, torch.tensor([0, 1, 0, 1]))
    assert advantages[0] < 0 < advantages[2]
    assert advantages[1] < 0 < advantages[3]


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exact_zeros(estimator, reward, dtype):
    """0.1 + 0.1 + 0.1 is not 3 * 0.1 in floating point: divided by 1e-6 the rest would be a real advantage."""
    advantages = estimator(torch.full((7,), reward, dtype=dtype), torch.zeros(7, dtype=torch.int64))
    assert advantages.tolist() == [0.0] * 7


@every_estimator
def test_a_group_of_one_learns_nothing(estimator):
    advantages = estimator(torch.tensor([3.0, 1.0, 2.0, 0.1]), torch.tensor([0, 1, 1, 2]))
    assert advantages[0] == advantages[3] == 0.0
    assert advantages[1] < 0 < advantages[2]


@every_estimator
def test_one_sample_per_prompt_throughout_learns_nothing(estimator):
    assert estimator(torch.tensor([3.0, 0.1, -2.0]), torch.tensor([0, 1, 2])).tolist() == [0.0, 0.0, 0.0]


@every_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_named(estimator, bad):
    with pytest.raises(ValueError, match=rf"reward of sample 1 \(group -9\) is {bad}"):
        estimator(torch.tensor([0.0, bad, bad]), torch.tensor([-9, -9, -9]))


@every_estimator
def test_rewards_must_be_floating_lest_advantages_are_cut_to_integers(estimator):
    with pytest.raises(ValueError, match=r"rewards must be floating, got torch.int64"):
        estimator(torch.tensor([0, 1]), torch.tensor([0, 0]))


@every_estimator
def test_an_empty_batch_has_no_advantages(estimator):
    assert estimator(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once_at_the_end(estimator, dtype):
    rewards, groups = torch.tensor([1.0, 0.1, 0.3, 0.1, 1000.0, 1001.0]).to(dtype), torch.tensor([0, 0, 0, 0, 1, 1])
    advantages = estimator(rewards, groups)
    assert advantages.dtype == dtype
    assert torch.equal(advantages, estimator(rewards.double(), groups).to(dtype))
