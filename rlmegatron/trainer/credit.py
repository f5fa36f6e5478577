"""Scores and credit: what the models think of the sampled tokens, and which tokens get how much of the reward.

In: a `StepBatch` and the learner. Out: the batch with log-probabilities, values, advantages and returns. Every number
is the same however the samples are spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.algorithms.divergence import divergence
from rlmegatron.algorithms.ragged import broadcast_to_tokens
from rlmegatron.algorithms.table import PER_SAMPLE, Piece
from rlmegatron.algorithms.token_rewards import token_rewards
from rlmegatron.algorithms.whitening import masked_moments, mean_and_variance, whiten
from rlmegatron.config.schema import AlgorithmConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.learner import Learner
from rlmegatron.trainer.batch import StepBatch


def add_scores(learner: Learner, batch: StepBatch) -> tuple[StepBatch, Tensor]:
    """The batch with `old_logp` and, where there are such models, `ref_logp` and `values`; and the entropy [T]."""
    micro_batches = batch.micro_batches
    old_logp, entropy = learner.actor.logprobs(batch.local, micro_batches)
    scores = {"old_logp": old_logp}
    if learner.reference is not None:
        scores["ref_logp"], _ = learner.reference.logprobs(batch.local, micro_batches)
    if learner.critic is not None:
        scores["values"] = learner.critic.values(batch.local, micro_batches)
    return batch.with_local(batch.local.with_tensors(**scores)), entropy


def add_advantages(
    batch: StepBatch,
    piece: Piece,
    config: AlgorithmConfig,
    *,
    group: dist.ProcessGroup,
    collect: Callable[[Any], list[Any]],
) -> StepBatch:
    """Collective over the data-parallel `group`; `collect` gathers a Python object from every rank of the world."""
    local = batch.local
    kl = _charged_kl(local, config)
    if piece.form.name == PER_SAMPLE:
        totals = _reward_totals(batch, kl, config, collect)
        per_sample = piece(rewards=totals, group_ids=batch.group_ids, normalize_std=config.normalize_std)
        own = per_sample[torch.tensor(batch.own, dtype=torch.int64)].float().to(local.tokens.device)
        advantages = broadcast_to_tokens(own, local.cu_seqlens, local.loss_mask)
        return batch.with_local(local.with_tensors(advantages=advantages))
    offered = {
        "token_rewards": _token_rewards(local, kl, config),
        "mask": local.loss_mask,
        "cu_seqlens": local.cu_seqlens,
        "gamma": config.gamma,
        "lam": config.lam,
    }
    if local.values is not None:
        offered["values"] = local.values
    advantages, returns = piece(**offered)
    if config.whiten:
        moments = masked_moments(advantages, local.loss_mask)
        dist.all_reduce(moments, group=group)
        mean, var = mean_and_variance(moments)
        advantages = whiten(advantages, local.loss_mask, mean=mean, var=var)
    return batch.with_local(local.with_tensors(advantages=advantages, returns=returns))


def _charged_kl(local: TrainBatch, config: AlgorithmConfig) -> Tensor | None:
    if config.kl.where != "reward":
        return None
    return divergence(local.scores("old_logp"), local.scores("ref_logp"), config.kl.estimator)


def _token_rewards(local: TrainBatch, kl: Tensor | None, config: AlgorithmConfig) -> Tensor:
    coef = config.kl.coef if kl is not None else 0.0
    return token_rewards(local.rewards, local.loss_mask, local.cu_seqlens, kl=kl, kl_coef=coef)


def _reward_totals(
    batch: StepBatch, kl: Tensor | None, config: AlgorithmConfig, collect: Callable[[Any], list[Any]]
) -> Tensor:
    """[N] float64: each sample's reward, less its charged divergence."""
    if kl is None:
        return batch.rewards
    charged = torch.zeros(batch.local.num_sequences, dtype=torch.float64, device=kl.device)
    charged.index_add_(0, batch.local.sequence_index, torch.where(batch.local.loss_mask, kl, 0.0).double())
    totals = batch.rewards
    for part in collect(dict(zip(batch.own, charged.tolist(), strict=True))):
        for number, divergence_of_sample in part.items():
            totals[number] = batch.facts[number].reward - config.kl.coef * divergence_of_sample
    return totals
