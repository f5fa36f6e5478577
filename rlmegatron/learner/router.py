"""The router of a mixture of experts: which experts a token goes to, and with which weights, as the family defines it.

In: router logits, and experts that a micro-batch prescribes. Out: Megatron's pair of (weights, map). Numbers are those
of the family's Hugging Face model, which Megatron's own routing lacks for some of them (groups ranked by their best
expert, sigmoid weights not normalised).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlmegatron.algorithms.expert_balance import choices_per_sequence, sequence_balance
from rlmegatron.learner.routing import Routing
from rlmegatron.models.architecture import Experts

# T tokens, E experts, K experts of a token, G groups
_NO_ZERO = 1e-20  # as in DeepSeek-V3's code: the sum of chosen sigmoid scores may vanish


class Router(TopKRouter):
    """Megatron's router with the family's routing, of the layer that is the `layer`-th of those with experts.

    It does as `told` by the micro-batch that its layer runs. The bias of the choice is moved by `ExpertRouting` alone.
    """

    def __init__(self, config: TransformerConfig, *args: Any, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.experts = experts
        self.layer = 0
        self.told: Routing | None = None
        if experts.bias:
            del self.expert_bias  # None, since Megatron's own updates of it are off
            bias = torch.zeros(experts.num, dtype=torch.float32, device=torch.empty(0).device)
            self.register_buffer("expert_bias", bias)

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[..., E] logits -> weights [T E], 0 where not chosen, and the map [T E]."""
        told, experts = self.told, self.experts
        scores = score(logits.view(-1, experts.num), experts)
        own = chosen = choose(scores, self.expert_bias, experts)
        if told is not None and told.wanted is not None:
            chosen = replayed(told.wanted[self.layer].long(), own, _for_choice(scores, self.expert_bias))
        weights, is_chosen = weigh(scores, chosen, experts)
        # A layer that is recomputed runs twice on the same micro-batch, first without gradients.
        if told is None or not told.learns or not torch.is_grad_enabled():
            return weights, is_chosen
        nothing = torch.zeros((), device=scores.device)
        balance = balance_of(scores, told, top_k=experts.top_k) if told.balance_weight else nothing
        told.note(
            self.layer,
            load=(is_chosen & told.counted[:, None]).sum(0),
            balance=balance,
            differing=(~is_chosen.gather(1, own)).sum(),
            replayed=nothing if told.wanted is None else (told.wanted[self.layer] >= 0).sum(),
        )
        if told.balance_weight:
            weights = _WithLoss.apply(weights, balance * told.balance_weight)
        return weights, is_chosen


def listen(layer: nn.Module, *, number: int) -> None:
    """Make `layer`, the `number`-th of those with experts, tell its router of each micro-batch that it runs."""
    router = layer.get_submodule("mlp.router")
    assert isinstance(router, Router), f"layer {number} has a router of another kind: {type(router).__name__}"
    router.layer = number

    def tell(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        router.told = kwargs["packed_seq_params"].routing

    layer.register_forward_pre_hook(tell, with_kwargs=True)


def route(logits: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """logits [T E], bias [E] or None -> weights [T E] fp32, 0 where not chosen, and which are chosen [T E]."""
    scores = score(logits, experts)
    return weigh(scores, choose(scores, bias, experts), experts)


def score(logits: Tensor, experts: Experts) -> Tensor:
    """[T E] fp32: what each expert is worth to each token."""
    logits = logits.float()
    return logits.softmax(-1) if experts.scoring == "softmax" else logits.sigmoid()


def choose(scores: Tensor, bias: Tensor | None, experts: Experts) -> Tensor:
    """[T K] int64: the family's own choice, best first."""
    choice = _for_choice(scores, bias)
    if experts.num_groups > 1:
        choice = _within_best_groups(choice, experts)
    return choice.topk(experts.top_k, dim=-1).indices


def replayed(wanted: Tensor, own: Tensor, choice: Tensor) -> Tensor:
    """[T K]: `wanted` [T K] where it names experts, else `own`; in the order of `choice` [T E], best first.

    In that order the same experts give the same weights to the last bit, whoever chose them.
    """
    named = wanted.clamp(min=0)
    order = choice.gather(1, named).argsort(dim=-1, descending=True, stable=True)
    return torch.where(wanted[:, :1] >= 0, named.gather(1, order), own)


def weigh(scores: Tensor, chosen: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """scores [T E], chosen [T K] -> weights [T E], 0 where not chosen, and which are chosen [T E]."""
    weights = scores.gather(1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_ZERO)
    spread = torch.zeros_like(scores).scatter(1, chosen, weights * experts.scale)
    return spread, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def balance_of(scores: Tensor, told: Routing, *, top_k: int) -> Tensor:
    """This rank's part of the sum of `sequence_balance` over the micro-batch; collective where sequences are cut."""
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(top_k, dim=-1).indices, True)
    choices = choices_per_sequence(best, told.sequence, len(told.lengths))
    if told.group is not None:
        dist.all_reduce(choices, group=told.group)
    return sequence_balance(scores, told.sequence, told.lengths, choices, top_k=top_k)


class _WithLoss(torch.autograd.Function):
    """Weights as they are, whose backward pass also differentiates a loss; Megatron's own would scale it."""

    @staticmethod
    def forward(_: Any, weights: Tensor, loss: Tensor) -> Tensor:
        del loss
        return weights.view_as(weights)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype, device=gradient.device)


def _for_choice(scores: Tensor, bias: Tensor | None) -> Tensor:
    return scores if bias is None else scores + bias


def _within_best_groups(choice: Tensor, experts: Experts) -> Tensor:
    """Scores of experts outside the best groups become -inf."""
    grouped = choice.view(len(choice), experts.num_groups, -1)
    worth = grouped.topk(experts.group_best, dim=-1).values.sum(-1)
    best = worth.topk(experts.top_groups, dim=-1, sorted=False).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).view_as(choice)
