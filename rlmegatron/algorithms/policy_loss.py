"""Owns the losses that turn advantages into gradients of the policy.

In: per-token log-probabilities, advantages and weights of one micro-batch; out: a `LossTerm`, whose total is a sum.
Must never import torch.distributed or the configuration.
"""

# T tokens of all sequences, N sequences

from __future__ import annotations

import torch
from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm, Stat, mean_stat, weighted_sum
from rlmegatron.algorithms.ragged import sequence_ids
from rlmegatron.algorithms.ratio import bounded_exp, sequence_log_ratio
from rlmegatron.algorithms.shapes import expect


def ppo_clip(
    *,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossTerm:
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7): sum of w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).

    r = exp(logp - old_logp). As in verl the log-ratio is cut to [-20, 20] first, so loss and gradient stay finite; a
    token outside has no gradient. Tokens of weight 0 may hold anything, NaN included. Different clip distances are
    DAPO's clip-higher (arXiv 2503.14476, eq. 10). `dual_clip` bounds the loss by -A dual_clip where A < 0 (arXiv
    1912.09729, eq. 5); None turns it off.

    logp (with gradient), old_logp: [T] nats. advantages: [T]. weights: [T] from `token_weights`.
    Stats over counted tokens: clip_fraction (where the clip decides), dual_clip_fraction (where the bound does; only
    with `dual_clip`). Raises ValueError for a dual_clip of 1 or less.

    >>> logp, old_logp = torch.tensor([0.5, 1.5]).log(), torch.tensor([1.0, 1.0]).log()
    >>> term = ppo_clip(logp=logp, old_logp=old_logp, advantages=torch.tensor([1.0, 1.0]),
    ...                 weights=torch.ones(2), clip_low=0.2, clip_high=0.2)
    >>> round(float(term.total), 4), term.stats["clip_fraction"].parts.tolist()
    (-1.7, [1.0, 2.0])
    """
    expect("T", logp=logp, old_logp=old_logp, advantages=advantages, weights=weights)
    counted = weights > 0
    ratio = bounded_exp(_kept(logp - old_logp, counted))
    advantages = _kept(advantages, counted)
    loss, stats = _clipped_surrogate(ratio, advantages, counted, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1 (3 is usual) or None, got {dual_clip}")
        bound = -advantages * dual_clip
        binds = (advantages < 0) & (loss > bound)
        loss = torch.where(binds, bound, loss)
        stats["dual_clip_fraction"] = mean_stat(binds, counted)
    return LossTerm(weighted_sum(loss, weights), stats)


def gspo(
    *,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
) -> LossTerm:
    """GSPO (arXiv 2507.18071, eq. 5 and 7): PPO's surrogate with one ratio s for all tokens of an answer.

    s = exp(mean of logp - old_logp over the answer's counted tokens), the mean cut to [-20, 20] without gradient
    outside; every counted token adds w max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), and its log-probability
    receives the gradient of all of them through the mean. A token counts, for the mean as for the sum, where the mask
    says so and its weight is not 0. The paper's clip distances are 3e-4 and 4e-4, with 'seq_mean_token_mean'.

    logp (with gradient), old_logp: [T] nats. advantages: [T]. weights: [T] from `token_weights`. mask: [T] bool.
    cu_seqlens: [N+1]; a sequence must not be cut over micro-batches. Stat over counted tokens: clip_fraction.

    >>> logp, cu_seqlens = torch.tensor([0.9, 1.6, 1.5]).log(), torch.tensor([0, 2, 3])
    >>> term = gspo(logp=logp, old_logp=torch.zeros(3), advantages=torch.tensor([1.0, 1.0, -1.0]),
    ...             weights=torch.tensor([0.5, 0.5, 1.0]), mask=torch.ones(3, dtype=torch.bool),
    ...             cu_seqlens=cu_seqlens, clip_low=0.1, clip_high=0.1)
    >>> round(float(term.total), 4), term.stats["clip_fraction"].parts.tolist()  # -min(sqrt(0.9 * 1.6), 1.1) + 1.5
    (0.4, [2.0, 3.0])
    """
    (num_tokens,) = expect("T", logp=logp, old_logp=old_logp, advantages=advantages, weights=weights, mask=mask)
    counted = mask & (weights > 0)
    log_ratio = sequence_log_ratio(logp - old_logp, counted, cu_seqlens, mean=True)
    # Not s[ids]: its backward pass is slow on a GPU where many tokens share an entry.
    ratio = bounded_exp(log_ratio).index_select(0, sequence_ids(cu_seqlens, num_tokens)).to(logp.dtype)
    loss, stats = _clipped_surrogate(ratio, _kept(advantages, counted), counted, clip_low=clip_low, clip_high=clip_high)
    return LossTerm(weighted_sum(loss, weights), stats)


def cispo(
    *, logp: Tensor, old_logp: Tensor, advantages: Tensor, weights: Tensor, clip_low: float, clip_high: float
) -> LossTerm:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): sum of -w sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp.

    r = exp(logp - old_logp), and sg stops the gradient: the clip bounds a token's weight but silences no token. The
    paper leaves the lower side open (clip_low 1).

    logp (with gradient), old_logp: [T] nats. advantages: [T]. weights: [T] from `token_weights`.
    Stat over counted tokens: clip_fraction (where r lies outside the clip, whatever the advantage).

    >>> logp, old_logp = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log()
    >>> term = cispo(logp=logp, old_logp=old_logp, advantages=torch.tensor([1.0, -1.0]),
    ...              weights=torch.ones(2), clip_low=1.0, clip_high=0.5)
    >>> round(float(term.total), 4), term.stats["clip_fraction"].parts.tolist()  # (1.5 - 1) log 2
    (0.3466, [1.0, 2.0])
    """
    expect("T", logp=logp, old_logp=old_logp, advantages=advantages, weights=weights)
    counted = weights > 0
    logp, old_logp, advantages = (_kept(x, counted) for x in (logp, old_logp, advantages))
    ratio = bounded_exp((logp - old_logp).detach())
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    stats = {"clip_fraction": mean_stat(ratio != bounded, counted)}
    return LossTerm(weighted_sum(-bounded * advantages * logp, weights), stats)


def reinforce(*, logp: Tensor, advantages: Tensor, weights: Tensor) -> LossTerm:
    """Policy gradient without a ratio: sum of -w A logp (Williams 1992; GPG, arXiv 2504.02546).

    Right only where the tokens were drawn from the policy that is updated: one update per batch of answers.

    logp (with gradient): [T] nats. advantages: [T]. weights: [T] from `token_weights`. No stats.

    >>> logp, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -1.0])
    >>> float(reinforce(logp=logp, advantages=advantages, weights=torch.tensor([1.0, 0.5])).total)
    2.0
    """
    expect("T", logp=logp, advantages=advantages, weights=weights)
    counted = weights > 0
    return LossTerm(weighted_sum(-_kept(advantages, counted) * _kept(logp, counted), weights))


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, counted: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Stat]]:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), {"clip_fraction": mean_stat(clipped > unclipped, counted)}


def _kept(x: Tensor, counted: Tensor) -> Tensor:
    """What does not count is cut off before any arithmetic: the gradient of a NaN is NaN even at weight 0."""
    return torch.where(counted, x, torch.zeros_like(x))
