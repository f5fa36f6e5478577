"""Credit on one rank: measurements that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmegatron.algorithms.table import resolve
from rlmegatron.config.algorithm import AlgorithmConfig, KLConfig
from rlmegatron.config.schema import RewardConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.trainer.adapted import Adapted
from rlmegatron.trainer.credit import Credit


def credit() -> Credit:
    """Of the one rank there is."""
    config, alone = AlgorithmConfig(kl=KLConfig(where="loss", estimator="k2")), Adapted(0.1, None)
    group: Any = None
    return Credit(resolve("advantage", "grpo"), config, RewardConfig(), alone, group, lambda found: [found])


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


def test_without_a_token_that_counts_no_divergence_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """k2 by hand: (1^2 + 3^2) / 2 over two tokens."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    assert credit().kl_from_reference(scored([True, True])) == pytest.approx(2.5)
    assert credit().kl_from_reference(scored([False, False])) is None
