"""ReMax compares a sample with its prompt's greedy answer, and with nothing else."""

import math

import pytest
import torch

from rlmegatron.algorithms.remax import remax


def test_the_baseline_is_the_samples_own_greedy_reward():
    rewards, greedy = torch.tensor([1.0, 0.0, 0.5, -1.0]), torch.tensor([1.0, 0.25, -0.5, -1.0])
    assert remax(rewards, greedy).tolist() == [0.0, -0.25, 1.0, 0.0]


def test_a_permutation_of_the_batch_permutes_the_advantages():
    rng = torch.Generator().manual_seed(0)
    rewards, greedy, order = (
        torch.rand(9, generator=rng),
        torch.rand(9, generator=rng),
        torch.randperm(9, generator=rng),
    )
    assert torch.equal(remax(rewards[order], greedy[order]), remax(rewards, greedy)[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once_at_the_end(dtype):
    rewards, greedy = torch.tensor([0.1, 1000.0]).to(dtype), torch.tensor([0.3, 0.7])
    advantages = remax(rewards, greedy)
    assert advantages.dtype == dtype
    assert torch.equal(advantages, (rewards.double() - greedy.double()).to(dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_named(bad):
    good, wrong, group_ids = torch.ones(3), torch.tensor([0.0, 0.0, bad]), torch.tensor([4, 4, 6])
    with pytest.raises(ValueError, match=f"^greedy reward of sample 2 is {bad}"):
        remax(good, wrong)
    with pytest.raises(ValueError, match=rf"^greedy reward of sample 2 \(group 6\) is {bad}"):
        remax(good, wrong, group_ids=group_ids)
    with pytest.raises(ValueError, match=rf"^reward of sample 2 \(group 6\) is {bad}"):
        remax(wrong, good, group_ids=group_ids)


def test_an_empty_batch_has_no_advantages():
    assert remax(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_every_sample_has_its_greedy_reward():
    with pytest.raises(ValueError, match="greedy_rewards must have shape"):
        remax(torch.zeros(3), torch.zeros(2))
