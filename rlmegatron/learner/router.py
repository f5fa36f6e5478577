"""The router of a mixture of experts: which experts a token goes to, and with which weights, as the family defines it.

In: router logits. Out: Megatron's pair of (weights, map). Numbers are those of the family's Hugging Face model, which
Megatron's own routing lacks for some of them (groups ranked by their best expert, sigmoid weights not normalised).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlmegatron.models.architecture import Experts

# T tokens, E experts, G groups
_NO_ZERO = 1e-20  # as in DeepSeek-V3's code: the sum of chosen sigmoid scores may vanish


class Router(TopKRouter):
    """Megatron's router with the family's routing; the bias of the choice is frozen, as nothing balances load here."""

    def __init__(self, config: TransformerConfig, *args: Any, experts: Experts, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.experts = experts
        if experts.bias:
            del self.expert_bias  # None, since Megatron's own updates of it are off
            bias = torch.zeros(experts.num, dtype=torch.float32, device=torch.empty(0).device)
            self.register_buffer("expert_bias", bias)

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[..., E] logits -> weights [T E], 0 where not chosen, and the map [T E]."""
        return route(logits.view(-1, self.experts.num), self.expert_bias, self.experts)


def route(logits: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """logits [T E] fp32, bias [E] or None -> weights [T E] fp32, 0 where not chosen, and which are chosen [T E]."""
    logits = logits.float()
    scores = logits.softmax(-1) if experts.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if experts.num_groups > 1:
        choice = _within_best_groups(choice, experts)
    chosen = choice.topk(experts.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _NO_ZERO)
    spread = torch.zeros_like(scores).scatter(1, chosen, weights * experts.scale)
    return spread, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)


def _within_best_groups(choice: Tensor, experts: Experts) -> Tensor:
    """Scores of experts outside the best groups become -inf."""
    grouped = choice.view(len(choice), experts.num_groups, -1)
    worth = grouped.topk(experts.group_best, dim=-1).values.sum(-1)
    best = worth.topk(experts.top_groups, dim=-1, sorted=False).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).view_as(choice)
