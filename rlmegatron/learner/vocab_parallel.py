"""Log-probabilities and entropy of chosen tokens straight from hidden states, vocabulary-parallel and in chunks.

In: hidden states and this rank's rows of the output layer. Out: values that are equal on every tensor-parallel rank.
Logits exist for one chunk of tokens at a time, in the forward and again in the backward pass, and are never gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.learner.fp32_product import fp32_product

# R rows (tokens whose log-probability is wanted), H hidden size, W vocabulary rows of this rank
_FAR_BELOW = -1e30  # finite, so that probability 0 times its logit is 0 and not NaN


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature)[labels] and that distribution's entropy, both [R] fp32 in nats.

    hidden: [R H], equal on every rank of `group`; the caller reduces its gradient over the group (as Megatron's
    `copy_to_tensor_model_parallel_region` does). weight: [W H], rows rank*W onwards; rows at or above `vocab_size` are
    padding and take no probability. labels: [R] below `vocab_size`.
    """
    logp, entropy = _TokenLogprobs.apply(hidden, weight, labels, group, vocab_size, temperature, chunk)
    return logp, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Any,
        vocab_size: int,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        shard = _Shard(weight, group, vocab_size, temperature)
        logp, entropy, log_z = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for rows in _chunks(len(hidden), chunk):
            logits = shard.logits(hidden[rows])
            peak = shard.maximum(logits.amax(-1))
            shifted = logits.sub_(peak[:, None])
            exp = shifted.exp()
            target = shard.at_labels(shifted, labels[rows])
            total, weighted, chosen = shard.total(torch.stack([exp.sum(-1), (exp * shifted).sum(-1), target]))
            log_total = total.log()
            logp[rows] = chosen - log_total
            entropy[rows] = log_total - weighted / total
            log_z[rows] = peak + log_total
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.shard_args, ctx.chunk = (group, vocab_size, temperature), chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        shard = _Shard(weight, *ctx.shard_args)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _chunks(len(hidden), ctx.chunk):
            log_p = shard.logits(hidden[rows]).sub_(log_z[rows, None])
            p = log_p.exp()
            # d logp / d z_j = 1[j = label] - p_j;  d entropy / d z_j = -p_j (log p_j + entropy)
            grad = p * -(grad_logp[rows, None] + grad_entropy[rows, None] * (log_p + entropy[rows, None]))
            shard.add_at_labels(grad, labels[rows], grad_logp[rows])
            grad = grad.div_(shard.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class _Shard:
    """One rank's rows of the output layer."""

    def __init__(self, weight: Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float) -> None:
        self.weight, self.group, self.temperature = weight, group, temperature
        self.first = group.rank() * len(weight)
        self.num_real = max(0, min(len(weight), vocab_size - self.first))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R W] fp32 at the sampling temperature; padding columns far below everything."""
        logits = fp32_product(hidden, self.weight).div_(self.temperature)
        logits[:, self.num_real :] = _FAR_BELOW
        return logits

    def maximum(self, values: Tensor) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def total(self, values: Tensor) -> Tensor:
        if self.group.size() > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def at_labels(self, values: Tensor, labels: Tensor) -> Tensor:
        """[R]: the label's value where this rank owns the label, else 0."""
        column, mine = self._columns(labels)
        return values.gather(1, column[:, None]).squeeze(1) * mine

    def add_at_labels(self, values: Tensor, labels: Tensor, amount: Tensor) -> None:
        column, mine = self._columns(labels)
        values.scatter_add_(1, column[:, None], (amount * mine)[:, None])

    def _columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        column = labels - self.first
        mine = (column >= 0) & (column < len(self.weight))
        return column * mine, mine


def _chunks(num_rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]
