"""Three tiny Hugging Face models, one batch, and what Hugging Face and plain torch make of them.

In: a directory. Out: model directories, and a `Reference` of log-probs, values and weights after one AdamW step. Runs
in a rank; must never use the learner, which is what it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlmegatron.data.batch import TrainBatch, assemble
from rlmegatron.types import Prompt, Sample, SampleGroup

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 24, "tie_word_embeddings": True},
    "Qwen2": {"tie_word_embeddings": False},
    "Llama": {"tie_word_embeddings": False},
}
# A vocabulary that no tensor-parallel size divides, two query heads for each KV head.
SIZES = {
    "vocab_size": 37,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TEMPERATURE = 0.7
LR = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-6  # far above the rounding of a gradient, or the first step of one that is nearly 0 is decided by it
CLIP = 1.0


def write_models(directory: Path, **changes: Any) -> None:
    """`directory`/{Qwen3, Qwen2, Llama}: weights large enough that every one of them matters."""
    import transformers

    for family, extra in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **extra, **changes})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.mul_(5)
        model.save_pretrained(directory / family)


def batch_of(samples: range) -> TrainBatch:
    """Sequences `samples` of eight, 5 to 14 tokens long, with an advantage for every answer token."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for number in range(8):
        prompt = tuple(torch.randint(0, 37, (3 + number % 3,), generator=generator).tolist())
        answer = tuple(torch.randint(0, 37, (2 + number,), generator=generator).tolist())
        sample = Sample(number, 0, answer, (-1.0,) * len(answer), (0,) * len(answer), "stop", "", reward=1.0)
        groups.append(SampleGroup(Prompt(number, prompt, "", {}, ""), (sample,)))
    batch = assemble([groups[number] for number in samples])
    return batch.with_tensors(advantages=torch.sin(batch.positions + 3.0 * batch.tokens) + 0.5)


def value_head() -> Tensor:
    """[1 H]."""
    return torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)) * 0.3


def policy_loss(batch: TrainBatch, logp: Tensor, entropy: Tensor) -> Tensor:
    """Summed over the batch; every token with a weight of its own."""
    return -(batch.scores("advantages") * logp).sum() - 0.1 * (entropy * batch.loss_mask).sum()


def value_loss(batch: TrainBatch, values: Tensor) -> Tensor:
    """Summed over the batch."""
    return ((values - batch.scores("advantages")).square() * batch.loss_mask).sum()


@dataclass(frozen=True)
class Reference:
    """Per-token values of the whole batch [T]; weights by Hugging Face name after one step."""

    logp: Tensor
    entropy: Tensor
    values: Tensor
    logp_after: Tensor
    values_after: Tensor
    actor_weights: dict[str, Tensor]
    critic_weights: dict[str, Tensor]
    actor_grad_norm: float
    critic_grad_norm: float


def hf_reference(directory: str, dtype: torch.dtype = torch.float32) -> Reference:
    """One sequence at a time, plain softmax over whole logits, torch's AdamW."""
    from transformers import AutoModelForCausalLM

    def load() -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)

    batch = batch_of(range(8))
    actor, body = load(), load().model
    head = nn.Linear(SIZES["hidden_size"], 1, bias=False, dtype=dtype)
    head.weight.data.copy_(value_head())
    logp, entropy = hf_scores(actor, batch)
    values = hf_values(body, head, batch)
    actor_norm = _step(actor, policy_loss(batch, logp, entropy) / float(batch.loss_mask.sum()))
    critic = nn.ModuleDict({"model": body, "value_head": head})
    critic_norm = _step(critic, value_loss(batch, values) / float(batch.loss_mask.sum()))
    with torch.no_grad():
        logp_after, values_after = hf_scores(actor, batch)[0], hf_values(body, head, batch)
    return Reference(
        *(tensor.detach() for tensor in (logp, entropy, values, logp_after, values_after)),
        {name: tensor.detach().clone() for name, tensor in actor.state_dict().items()},
        {name: tensor.detach().clone() for name, tensor in critic.state_dict().items()},
        actor_norm,
        critic_norm,
    )


def _step(model: nn.Module, loss: Tensor) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    optimizer.step()
    return norm


def _per_sequence(batch: TrainBatch, score: Callable[[Tensor], Tensor]) -> Tensor:
    """`score(tokens [L])` -> [L-1 ...]: what each position says about the next token, moved onto that token."""
    rows = []
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        found = score(batch.tokens[start:stop])
        rows.append(torch.cat([found.new_zeros(1, *found.shape[1:]), found]))
    joined = torch.cat(rows)
    mask = batch.loss_mask.view(-1, *[1] * (joined.dim() - 1))
    return torch.where(mask, joined, 0.0)


def hf_scores(model: Any, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """(logp, entropy), [T] each, 0 where the token does not count."""

    def score(tokens: Tensor) -> Tensor:
        logits = model(tokens[None]).logits[0, :-1].float() / TEMPERATURE
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(1, tokens[1:, None])[:, 0]
        return torch.stack([chosen, -(log_p.exp() * log_p).sum(-1)], -1)

    logp, entropy = _per_sequence(batch, score).unbind(-1)
    return logp, entropy


def hf_values(body: Any, head: nn.Linear, batch: TrainBatch) -> Tensor:
    """[T], 0 where the token does not count."""
    return _per_sequence(batch, lambda tokens: head(body(tokens[None]).last_hidden_state[0, :-1])[:, 0].float())


def hf_references(directory: Path) -> dict[str, Any]:
    """Family -> `Reference` of the models that `write_models` left in `directory`."""
    return {family: hf_reference(f"{directory}/{family}") for family in FAMILIES}
