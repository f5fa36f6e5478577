"""Scores and credit: what the models think of the sampled tokens, and which tokens get how much of the reward.

In: a `StepBatch` and the learner. Out: the batch with log-probabilities, values, advantages and returns. Every number
is the same however the samples are spread over ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.algorithms.divergence import divergence
from rlmegatron.algorithms.importance import importance_weights
from rlmegatron.algorithms.loss_term import Stat, explained_variance_stat
from rlmegatron.algorithms.promised import promised_advantages, promised_pair
from rlmegatron.algorithms.ragged import broadcast_to_tokens
from rlmegatron.algorithms.reward_shaping import shape_rewards
from rlmegatron.algorithms.table import PER_SAMPLE, Piece
from rlmegatron.algorithms.token_rewards import token_rewards
from rlmegatron.algorithms.whitening import masked_moments, mean_and_variance, whiten
from rlmegatron.config.algorithm import AlgorithmConfig
from rlmegatron.config.schema import RewardConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.learner import Learner
from rlmegatron.trainer.adapted import Adapted
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


@dataclass(frozen=True)
class Credit:
    """How rewards become advantages: the estimator, its settings, and who takes part.

    `group` is the data-parallel group; `collect` gathers a Python object from every rank of the world.
    """

    piece: Piece
    config: AlgorithmConfig
    reward: RewardConfig
    adapted: Adapted
    group: dist.ProcessGroup
    collect: Callable[[Any], list[Any]]

    def assign(self, batch: StepBatch) -> tuple[StepBatch, Mapping[str, Stat]]:
        """Collective; the batch with advantages, returns and importance weights, and statistics of this rank's part.

        With a scale of returns, `values` and `returns` of the batch are in normalised units.
        """
        _refuse_unjudged(batch)
        rewards = self._shaped(batch.rewards)
        own = rewards[batch.own_numbers].float().to(batch.local.rewards.device)
        batch = batch.with_local(dataclasses.replace(batch.local, rewards=own))
        kl = self._charged_kl(batch.local)
        if self.piece.form.name == PER_SAMPLE:
            local = self._per_sample(batch, rewards, kl)
            stats: Mapping[str, Stat] = {}
        else:
            local, stats = self._per_token(batch.local, kl)
        if self.config.whitens:
            advantages = local.scores("advantages")
            mean, var = mean_and_variance(self._moments(advantages, local.loss_mask))
            local = local.with_tensors(advantages=whiten(advantages, local.loss_mask, mean=mean, var=var))
        local, of_engine = self._with_importance(local)
        return batch.with_local(local), {**stats, **of_engine}

    def kl_from_reference(self, local: TrainBatch) -> float | None:
        """Collective; mean of the configured estimator over all tokens of the step that count, before its update.

        None where none counts: no divergence was measured, which is not a divergence of 0.
        """
        moments = self._moments(self._kl(local), local.loss_mask)
        return mean_and_variance(moments)[0] if moments[0] else None

    def _shaped(self, rewards: Tensor) -> Tensor:
        return shape_rewards(rewards, clip=self.reward.clip, whiten=self.reward.whiten)

    def _per_sample(self, batch: StepBatch, rewards: Tensor, kl: Tensor | None) -> TrainBatch:
        offered = {
            "rewards": self._less_charged(batch, rewards, kl),
            "group_ids": batch.group_ids,
            "lengths": batch.answer_lengths,
            "normalize_std": self.config.normalize_std,
        }
        if "greedy_rewards" in self.piece.inputs:
            offered["greedy_rewards"] = shape_rewards(batch.greedy_rewards, clip=self.reward.clip, whiten=False)
        scores = promised_advantages(self.piece, self.piece(**offered), like=rewards)
        own = scores[batch.own_numbers].float().to(batch.local.tokens.device)
        advantages = broadcast_to_tokens(own, batch.local.cu_seqlens, batch.local.loss_mask)
        return batch.local.with_tensors(advantages=advantages)

    def _per_token(self, local: TrainBatch, kl: Tensor | None) -> tuple[TrainBatch, dict[str, Stat]]:
        coef = self.adapted.kl_coef if kl is not None else 0.0
        offered = {
            "token_rewards": token_rewards(local.rewards, local.loss_mask, local.cu_seqlens, kl=kl, kl_coef=coef),
            "mask": local.loss_mask,
            "cu_seqlens": local.cu_seqlens,
            "gamma": self.config.gamma,
            "lam": self.config.lam,
        }
        scale, values = self.adapted.return_scale, local.values
        if values is not None:
            offered["values"] = values = values if scale is None else scale.denormalize(values)
        advantages, returns = promised_pair(self.piece, self.piece(**offered), mask=local.loss_mask)
        stats = {}
        if values is not None:
            stats["critic/explained_variance"] = explained_variance_stat(
                values=values, returns=returns, counted=local.loss_mask
            )
        if scale is not None:
            self.adapted.return_scale = scale = scale.update(self._moments(returns, local.loss_mask))
            returns = scale.normalize(returns)
        return local.with_tensors(advantages=advantages, returns=returns), stats

    def _moments(self, values: Tensor, mask: Tensor) -> Tensor:
        """[3] of the whole step."""
        moments = masked_moments(values, mask)
        dist.all_reduce(moments, group=self.group)
        return moments

    def _kl(self, local: TrainBatch) -> Tensor:
        return divergence(local.scores("old_logp"), local.scores("ref_logp"), self.config.kl.estimator)

    def _charged_kl(self, local: TrainBatch) -> Tensor | None:
        return self._kl(local) if self.config.kl.where == "reward" else None

    def _less_charged(self, batch: StepBatch, rewards: Tensor, kl: Tensor | None) -> Tensor:
        """[N] float64: each sample's reward, less its charged divergence."""
        if kl is None:
            return rewards
        local = batch.local
        charged = torch.zeros(local.num_sequences, dtype=torch.float64, device=kl.device)
        charged.index_add_(0, local.sequence_index, torch.where(local.loss_mask, kl, 0.0).double())
        totals = rewards.clone()
        for part in self.collect(dict(zip(batch.own, charged.tolist(), strict=True))):
            for number, divergence_of_sample in part.items():
                totals[number] = rewards[number] - self.adapted.kl_coef * divergence_of_sample
        return totals

    def _with_importance(self, local: TrainBatch) -> tuple[TrainBatch, Mapping[str, Stat]]:
        """Weights of the policy loss; tokens that the correction masks out count nowhere from here on."""
        config = self.config.importance
        if config.level == "none":
            return local, {}
        found = importance_weights(
            local.scores("old_logp"),
            local.rollout_logp,
            local.loss_mask,
            local.cu_seqlens,
            level=config.level,
            mode=config.mode,
            low=config.low,
            high=config.high,
        )
        weighted = local.with_tensors(importance=found.weights)
        stats = {f"importance/{name}": stat for name, stat in found.stats.items()}
        return dataclasses.replace(weighted, loss_mask=found.kept), stats


def _refuse_unjudged(batch: StepBatch) -> None:
    """A reward that is no number would spread to every sample of its group, and by whitening to all."""
    for sample in batch.facts:
        if not math.isfinite(sample.reward):
            raise ValueError(f"reward of sample {sample.index} of prompt {sample.prompt_id} is {sample.reward}")
