"""Log-probs, entropy and their gradients do not depend on how many ranks share the vocabulary.

What this does not prove: reductions in bf16 (the logits of one chunk are fp32 here, too).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from rlmegatron.learner.vocab_parallel import token_logprobs

VOCAB, HIDDEN, ROWS = 37, 16, 23


def sliced(padded: int) -> dict[str, torch.Tensor]:
    """One rank's share, with the gradient of the hidden states summed as the model's caller does."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    whole = torch.randn(padded, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    size, rank = padded // dist.get_world_size(), dist.get_rank()
    weight = whole[rank * size : (rank + 1) * size].clone().requires_grad_()
    logp, entropy = token_logprobs(
        hidden, weight, labels, group=dist.group.WORLD, vocab_size=VOCAB, temperature=0.7, chunk=5
    )
    (logp * torch.linspace(-1, 2, ROWS) + 0.3 * entropy * torch.linspace(1, 3, ROWS)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    dist.all_reduce(hidden.grad)
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.grad)
    return {"logp": logp.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": torch.cat(parts)}


@pytest.mark.parametrize(("size", "padded"), [(2, 48), (4, 64)])
def test_ranks_share_a_vocabulary(size: int, padded: int) -> None:
    """At 4 ranks of 16 rows the last holds nothing but padding."""
    alone = run_ranks(sliced, 1, padded)[0]
    assert float(alone["weight"][VOCAB:].abs().max()) == 0
    for found in run_ranks(sliced, size, padded):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6, msg=name)
