"""The policy losses under test, each beside a loop over tokens in Python floats, and the batches they are given."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from rlmegatron.algorithms.aggregation import token_weights
from rlmegatron.algorithms.policy_loss import cispo, gspo, ppo_clip, reinforce

AGGREGATION_CONSTANT = 6.0


def slow_ppo(logp, frozen, old_logp, advantages, weights, mask, cu_seqlens, clip_low, clip_high, dual_clip=None):
    """TRL's PPOTrainer token by token, with the dual clip of arXiv 1912.09729."""
    total, clipped, bounded = 0.0, 0, 0
    for new, old, advantage, weight in zip(logp, old_logp, advantages, weights, strict=True):
        if weight == 0:
            continue
        ratio = math.exp(new - old)
        loss1 = -advantage * ratio
        loss2 = -advantage * min(max(ratio, 1 - clip_low), 1 + clip_high)
        loss = max(loss1, loss2)
        if dual_clip is not None and advantage < 0:
            bounded += loss > -advantage * dual_clip
            loss = min(loss, -advantage * dual_clip)
        total += weight * loss
        clipped += loss2 > loss1
    counts = {"clip_fraction": clipped}
    return total, counts if dual_clip is None else {**counts, "dual_clip_fraction": bounded}


def slow_gspo(logp, frozen, old_logp, advantages, weights, mask, cu_seqlens, clip_low, clip_high):
    """The formula of the paper, answer by answer."""
    total, clipped = 0.0, 0
    for start, stop in pairwise(cu_seqlens):
        counted = [i for i in range(start, stop) if mask[i] and weights[i] > 0]
        if not counted:
            continue
        ratio = math.exp(math.fsum(logp[i] - old_logp[i] for i in counted) / len(counted))
        for i in counted:
            loss1 = -advantages[i] * ratio
            loss2 = -advantages[i] * min(max(ratio, 1 - clip_low), 1 + clip_high)
            total += weights[i] * max(loss1, loss2)
            clipped += loss2 > loss1
    return total, {"clip_fraction": clipped}


def slow_cispo(logp, frozen, old_logp, advantages, weights, mask, cu_seqlens, clip_low, clip_high):
    """The weight is taken at `frozen`, so that a difference quotient in `logp` leaves it alone."""
    total, clipped = 0.0, 0
    for new, still, old, advantage, weight in zip(logp, frozen, old_logp, advantages, weights, strict=True):
        if weight == 0:
            continue
        ratio = math.exp(still - old)
        bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
        total -= weight * bounded * advantage * new
        clipped += bounded != ratio
    return total, {"clip_fraction": clipped}


def slow_reinforce(logp, frozen, old_logp, advantages, weights, mask, cu_seqlens):
    triples = zip(logp, advantages, weights, strict=True)
    return -sum(weight * advantage * new for new, advantage, weight in triples if weight != 0), {}


@dataclass(frozen=True)
class Case:
    """A loss with its settings, and its loop, which returns the total and how many tokens each fraction counts."""

    loss: Callable[..., Any]
    slow: Callable[..., Any]
    inputs: tuple[str, ...]
    settings: dict[str, float] = field(default_factory=dict)

    def __call__(self, batch):
        return self.loss(**{name: batch[name] for name in self.inputs}, **self.settings)


_PER_TOKEN = ("logp", "old_logp", "advantages", "weights")
CASES = {
    "ppo_clip": Case(ppo_clip, slow_ppo, _PER_TOKEN, {"clip_low": 0.2, "clip_high": 0.3}),
    "dual_clip": Case(ppo_clip, slow_ppo, _PER_TOKEN, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5}),
    "gspo": Case(gspo, slow_gspo, (*_PER_TOKEN, "mask", "cu_seqlens"), {"clip_low": 0.1, "clip_high": 0.15}),
    "cispo": Case(cispo, slow_cispo, _PER_TOKEN, {"clip_low": 0.6, "clip_high": 0.4}),
    "reinforce": Case(reinforce, slow_reinforce, ("logp", "advantages", "weights")),
}


def random_batch(lengths, seed, aggregation="seq_mean_token_mean", dtype=torch.float64):
    """Answers of these lengths (prompts included) of which about two tokens in three count."""
    rng = torch.Generator().manual_seed(seed)
    num_tokens, cu_seqlens = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    logp = -torch.rand(num_tokens, generator=rng, dtype=dtype) * 3
    mask = torch.rand(num_tokens, generator=rng) < 0.7
    return {
        "logp": logp,
        "old_logp": logp + 0.5 * torch.randn(num_tokens, generator=rng, dtype=dtype),
        "advantages": torch.randn(num_tokens, generator=rng, dtype=dtype),
        "weights": token_weights(mask, cu_seqlens, aggregation, constant=AGGREGATION_CONSTANT).to(dtype),
        "mask": mask,
        "cu_seqlens": cu_seqlens,
    }


def select(batch, members, logp):
    """The sequences `members` of a batch, in that order, with the log-probabilities `logp` [T] in place of its own."""
    bounds = batch["cu_seqlens"].tolist()
    spans = [torch.arange(bounds[i], bounds[i + 1]) for i in members]
    at = torch.cat([*spans, torch.zeros(0, dtype=torch.int64)])
    picked = {name: tensor[at] for name, tensor in batch.items() if name != "cu_seqlens"}
    return {**picked, "logp": logp[at], "cu_seqlens": torch.tensor([0, *map(len, spans)]).cumsum(0)}


def backward(case, batch, members=None):
    """Total, gradient of all the batch's log-probabilities, and statistics of the loss of some of its sequences."""
    logp = batch["logp"].clone().requires_grad_()
    part = {**batch, "logp": logp} if members is None else select(batch, members, logp)
    term = case(part)
    term.total.backward()
    assert logp.grad is not None and not any(stat.parts.requires_grad for stat in term.stats.values())
    return term.total.detach(), logp.grad, term.stats
