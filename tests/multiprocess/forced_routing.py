"""Hugging Face models that send each token to prescribed experts, and what plain torch makes of them.

In: the directory of a model with experts. Out: a `Routed` of log-probs, gradients and balance. Runs in a rank; must
never use the learner or its algorithms, which are what it is compared with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from family_models import load_reference
from safetensors.torch import load_file
from tiny_models import batch_of, hf_scores, policy_loss
from torch import Tensor

NUM_COUNTED = 44.0
NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
GATES = ("Qwen3MoeTopKRouter", "MixtralTopKRouter", "DeepseekV3TopkRouter")


# T tokens of the eight sequences, L layers with experts, E experts, K experts of a token
@dataclass(frozen=True)
class Routed:
    """`forced` [T L K] are the experts prescribed, -1 for the last token of each sequence.

    `logp`, `gradients` (by checkpoint name) and `own` [T L K], what the routers would have chosen, are of a policy step
    with these experts. `balance`, its gradients and `free` [T L K], the choices, are of a step without.
    """

    forced: Tensor
    logp: Tensor
    gradients: dict[str, Tensor]
    own: Tensor
    balance: float
    balance_gradients: dict[str, Tensor]
    free: Tensor


class Gates:
    """The routers of a model; runs one sequence after the other and remembers scores and choices of all tokens."""

    def __init__(self, model: Any, forced: Tensor | None) -> None:
        self.config, self.forced, self.start = model.config, forced, 0
        found = [module for module in model.modules() if type(module).__name__ in GATES]
        self.scores: list[list[Tensor]] = [[] for _ in found]
        self.own: list[list[Tensor]] = [[] for _ in found]
        for place, gate in enumerate(found):
            if hasattr(gate, "e_score_correction_bias"):
                continue
            gate.register_forward_hook(self.softmax_gate(place))
        blocks = [module for module in model.modules() if type(module).__name__ == "DeepseekV3MoE"]
        for place, block in enumerate(blocks):
            block.route_tokens_to_experts = self.sigmoid_block(place, block.route_tokens_to_experts)
        model.register_forward_hook(self.advance)

    def advance(self, _: Any, __: Any, output: Any) -> None:
        self.start += output.logits.shape[1]

    def chosen(self, place: int, scores: Tensor, own: Tensor) -> Tensor:
        self.scores[place].append(scores)
        self.own[place].append(own)
        if self.forced is None:
            return own
        wanted = self.forced[self.start : self.start + len(own), place]
        return torch.where(wanted < 0, own, wanted)

    def softmax_gate(self, place: int) -> Callable[..., Any]:
        def again(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, _, own = output
            chosen = self.chosen(place, logits.softmax(-1), own)
            if self.config.model_type == "mixtral" or self.config.norm_topk_prob:
                return logits, logits.gather(1, chosen).softmax(-1), chosen
            return logits, logits.softmax(-1).gather(1, chosen), chosen

        return again

    def sigmoid_block(self, place: int, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
        def again(logits: Tensor) -> tuple[Tensor, Tensor]:
            chosen = self.chosen(place, logits.sigmoid(), choose(logits)[0])
            weights = logits.sigmoid().gather(1, chosen)
            return chosen, weights / weights.sum(-1, keepdim=True) * self.config.routed_scaling_factor

        return again

    def choices(self) -> Tensor:
        """[T L K]."""
        return torch.stack([torch.cat(own) for own in self.own], 1)

    def balance(self, top_k: int) -> Tensor:
        """Mean over sequences of the sum over layers, by eq. 17 to 20 of the DeepSeek-V3 report, number by number."""
        total = torch.zeros(())
        for of_layer in self.scores:
            for scores in of_layer:
                num_tokens, num_experts = scores.shape
                share = scores / scores.sum(-1, keepdim=True)
                best = scores.topk(top_k, dim=-1).indices.tolist()
                for expert in range(num_experts):
                    frequency = sum(expert in row for row in best) * num_experts / (top_k * num_tokens)
                    total = total + frequency * share[:, expert].mean()
        return total / len(self.scores[0])


def gradients(model: Any) -> dict[str, Tensor]:
    """By checkpoint name; a parameter without a gradient has 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        return load_file(f"{out}/model.safetensors")


def routed(directory: str) -> Routed:
    batch, shape = batch_of(range(8)), shape_of(directory)
    forced = other_experts(batch.cu_seqlens, *shape)
    model = load_reference(directory)
    gates = Gates(model, forced)
    logp, entropy = hf_scores(model, batch)
    (policy_loss(batch, logp, entropy) / NUM_COUNTED).backward()
    found = gradients(model)
    free_model = load_reference(directory)
    free = Gates(free_model, None)
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        free_model(batch.tokens[None, start:stop])
    balance = free.balance(shape[2])
    balance.backward()
    return Routed(
        forced,
        logp.detach(),
        found,
        gates.choices(),
        float(balance.detach()) / shape[0],
        gradients(free_model),
        free.choices(),
    )


def shape_of(directory: str) -> tuple[int, int, int]:
    """(layers with experts, experts, experts of a token)."""
    model = load_reference(directory)
    config = model.config
    num_layers = sum(type(module).__name__ in GATES for module in model.modules())
    num_experts = next(getattr(config, key) for key in NUM_EXPERTS if hasattr(config, key))
    return num_layers, num_experts, config.num_experts_per_tok


def other_experts(cu_seqlens: Tensor, num_layers: int, num_experts: int, top_k: int) -> Tensor:
    """[T L K]: distinct experts at random for every token but the last of each sequence."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.rand(int(cu_seqlens[-1]), num_layers, num_experts, generator=generator)
    chosen = noise.argsort(-1)[..., :top_k]
    chosen[cu_seqlens[1:].long() - 1] = -1
    return chosen
