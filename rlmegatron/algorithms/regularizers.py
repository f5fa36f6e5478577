"""Owns the terms that are added to a policy loss: the entropy bonus and the pull towards the reference.

In: per-token tensors and weights of one micro-batch; out: a `LossTerm`, whose total is a sum and already carries the
coefficient. Must never import torch.distributed or the configuration.
"""

# T tokens

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.divergence import divergence
from rlmegatron.algorithms.loss_term import LossTerm, mean_stat, weighted_sum
from rlmegatron.algorithms.shapes import expect


def entropy_bonus(*, entropy: Tensor, weights: Tensor, coef: float) -> LossTerm:
    """-coef * sum of w H (arXiv 1707.06347, eq. 9); statistic `entropy`, its mean over counted tokens in nats.

    entropy: [T] nats, of the distribution that each token was drawn from. weights: [T] from `token_weights`.

    >>> float(entropy_bonus(entropy=torch.tensor([2.0, 4.0]), weights=torch.tensor([1.0, 0.5]), coef=0.5).total)
    -2.0
    """
    expect("T", entropy=entropy, weights=weights)
    return LossTerm(-coef * weighted_sum(entropy, weights), {"entropy": mean_stat(entropy, weights > 0)})


def kl_penalty(
    *,
    logp: Tensor,
    ref_logp: Tensor,
    weights: Tensor,
    estimator: str,
    coef: float,
    old_logp: Tensor | None = None,
) -> LossTerm:
    """coef * sum of w KL-hat (GRPO, arXiv 2402.03300, eq. 4 with k3); statistic `kl_ref`, its mean in nats per token.

    logp (with gradient), ref_logp, old_logp: [T] nats. weights: [T] from `token_weights`. `estimator`: see
    `divergence`; 'k3_unbiased' needs old_logp (ValueError), for its gradient is k3's without it.

    >>> logp, ref_logp = torch.tensor([-1.0]), torch.tensor([-3.0])
    >>> float(kl_penalty(logp=logp, ref_logp=ref_logp, weights=torch.ones(1), estimator="k2", coef=0.5).total)
    1.0
    """
    expect("T", logp=logp, ref_logp=ref_logp, weights=weights)
    if estimator == "k3_unbiased" and old_logp is None:
        raise ValueError("kl_penalty: the estimator 'k3_unbiased' needs old_logp")
    counted = weights > 0
    # Cut the others' gradient off before the estimator: that of a NaN is NaN even at weight 0.
    logp = torch.where(counted, logp, torch.zeros_like(logp))
    per_token = divergence(logp, ref_logp, estimator, old_logp)
    return LossTerm(coef * weighted_sum(per_token, weights), {"kl_ref": mean_stat(per_token, counted)})
