"""Credit on one rank: settings that cannot go together, and measurements that are none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.algorithms.table import resolve
from rlmegatron.config.algorithm import AlgorithmConfig, KLConfig
from rlmegatron.config.schema import RewardConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.credit import Credit


def compared(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    return rewards - greedy_rewards


@pytest.fixture
def users_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An advantage of the user's own that compares with the greedy answer, as a module that can be imported."""
    module = ModuleType("users_advantages")
    vars(module)["compared"] = compared
    monkeypatch.setitem(sys.modules, "users_advantages", module)
    yield


def credit(*, advantage: str = "grpo", whiten: bool = False) -> Credit:
    """Of the one rank there is."""
    config, alone = AlgorithmConfig(kl=KLConfig(where="loss", estimator="k2")), Adapted(0.1, None)
    group: Any = None
    return Credit(
        resolve("advantage", advantage), config, RewardConfig(whiten=whiten), alone, group, lambda found: [found]
    )


def scored(counted: list[bool]) -> TrainBatch:
    """Three tokens, of which the last two belong to the answer and differ by 1 and 3 nats from the reference."""
    batch = TrainBatch(
        tokens=torch.tensor([1, 2, 3]),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        loss_mask=torch.tensor([False, *counted]),
        rollout_logp=torch.zeros(3),
        sample_ids=torch.tensor([0]),
        group_ids=torch.tensor([0]),
        rewards=torch.tensor([1.0]),
    )
    return batch.with_tensors(old_logp=torch.zeros(3), ref_logp=torch.tensor([0.0, -1.0, -3.0]))


@pytest.mark.parametrize("advantage", ["remax", "users_advantages:compared"])
def test_whitened_rewards_are_not_compared_with_a_bare_one(users_module: None, advantage: str) -> None:
    """The greedy answer's reward is not one of those that are whitened."""
    credit(advantage=advantage)
    with pytest.raises(ValueError, match=f"reward.whiten: true cannot go with algorithm.advantage '{advantage}'"):
        credit(advantage=advantage, whiten=True)


def test_without_a_token_that_counts_no_divergence_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """k2 by hand: (1^2 + 3^2) / 2 over two tokens."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    assert credit().kl_from_reference(scored([True, True])) == pytest.approx(2.5)
    assert credit().kl_from_reference(scored([False, False])) is None
