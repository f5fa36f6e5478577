"""The short supervised pass that leaves the quickstart model between knowing and guessing, and how well it does.

In: a tokenizer, a variant of the task and a seed. Out: a trained Qwen3ForCausalLM, and accuracies on held-out problems.
Must never import rlmegatron: the start is made by independent means.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from quickstart import problems, tiny_model
from quickstart.problems import Variant
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

NUM_STEPS = 300
BATCH_SIZE = 128
PEAK_LR = 1.5e-3
RAMP_STEPS = 50
IGNORED = -100


def warm_up(
    tokenizer: PreTrainedTokenizerFast, variant: Variant, *, seed: int, on_step: Callable[[int, float], None]
) -> Qwen3ForCausalLM:
    """Train a fresh model for `NUM_STEPS` on imperfect labels; `on_step(step, loss)` follows each optimizer step."""
    torch.manual_seed(seed)
    rng = random.Random(f"warmup {seed}")
    model = Qwen3ForCausalLM(tiny_model.model_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * learning_rate_factor(step)
        input_ids, labels = draw_batch(rng, tokenizer, variant)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step + 1, loss.item())
    model.generation_config = tiny_model.generation_config()
    model.eval()
    return model


def learning_rate_factor(step: int) -> float:
    """Linear ramp, then linear decay with a floor of 5 %."""
    return min((step + 1) / RAMP_STEPS, max(0.05, 1 - step / NUM_STEPS))


def draw_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, variant: Variant) -> tuple[Tensor, Tensor]:
    """Fresh training problems with imperfect labels: token ids and labels, both [BATCH_SIZE longest], right-padded.

    No attention mask is needed: attention is causal and padding comes last.
    """
    digits = [problems.draw_digits(rng, variant, held_out=False) for _ in range(BATCH_SIZE)]
    texts = [problems.warmup_label(rng, variant, problem) for problem in digits]
    prompts = tokenizer([problems.row(problem)["prompt"] for problem in digits])["input_ids"]
    targets = [[*ids, tiny_model.EOS_ID] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    ids_rows = [prompt + target for prompt, target in zip(prompts, targets, strict=True)]
    label_rows = [[IGNORED] * len(prompt) + target for prompt, target in zip(prompts, targets, strict=True)]
    return _pad(ids_rows, tiny_model.PAD_ID), _pad(label_rows, IGNORED)


@torch.no_grad()
def accuracy_by_length(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, digits: Sequence[str], *, sample_seed: int | None
) -> dict[int, tuple[int, int]]:
    """For each length (number of right answers that end in EOS, number asked); greedy if `sample_seed` is None."""
    by_length: dict[int, list[str]] = defaultdict(list)
    for problem in digits:
        by_length[len(problem)].append(problem)
    generator = None if sample_seed is None else torch.Generator().manual_seed(sample_seed)
    result = {}
    for length, group in sorted(by_length.items()):
        prompts = torch.tensor(tokenizer([problems.row(problem)["prompt"] for problem in group])["input_ids"])
        texts = tokenizer.batch_decode(_continue(model, prompts, length + 1, generator))
        right = [text == f"{problems.answer(problem)}<eos>" for text, problem in zip(texts, group, strict=True)]
        result[length] = (sum(right), len(right))
    return result


def _continue(model: Qwen3ForCausalLM, ids: Tensor, num_tokens: int, generator: torch.Generator | None) -> Tensor:
    """The next `num_tokens` tokens [B num_tokens] after ids [B T]: sampled at temperature 1, or greedy."""
    num_given = ids.shape[1]
    for _ in range(num_tokens):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        if generator is None:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=1)
    return ids[:, num_given:]


def _pad(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
