"""Log-probs and entropy of one process against log_softmax in float64; ranks are in multiprocess/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlmegatron.learner.vocab_parallel import token_logprobs

VOCAB, PADDED, HIDDEN = 13, 16, 6


@pytest.fixture(scope="module")
def group() -> Any:
    """This process alone."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def inputs(num_rows: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(num_rows, HIDDEN, generator=generator)).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (num_rows,), generator=generator)


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """logp, entropy and the gradients of `loss`, by autograd in float64 without the padding."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_p = (hidden @ weight[:VOCAB].t() / temperature).log_softmax(-1)
    logp, entropy = log_p.gather(1, labels[:, None])[:, 0], torch.special.entr(log_p.exp()).sum(-1)
    return logp.detach(), entropy.detach(), *torch.autograd.grad(loss(logp, entropy), (hidden, weight))


def loss(logp: Tensor, entropy: Tensor) -> Tensor:
    """Every row with a weight of its own, of both signs."""
    rows = torch.arange(len(logp), dtype=logp.dtype)
    return (logp * torch.sin(rows + 1)).sum() + (entropy * torch.cos(rows)).sum()


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values_and_gradients_equal_log_softmax(group: Any, chunk: int, temperature: float) -> None:
    hidden, weight, labels = inputs(11)
    logp, entropy = token_logprobs(
        hidden, weight, labels, group=group, vocab_size=VOCAB, temperature=temperature, chunk=chunk
    )
    gradients = torch.autograd.grad(loss(logp, entropy), (hidden, weight))
    for found, wanted in zip((logp, entropy, *gradients), expected(hidden, weight, labels, temperature), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)


def test_padding_rows_take_no_probability_and_no_gradient(group: Any) -> None:
    """Even where their logits would be the largest of all."""
    hidden, weight, labels = inputs(5)
    with torch.no_grad():
        weight[VOCAB:] *= 100
    logp, entropy = token_logprobs(hidden, weight, labels, group=group, vocab_size=VOCAB, temperature=1.0, chunk=3)
    torch.testing.assert_close(logp.double(), expected(hidden, weight, labels, 1.0)[0], rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss(logp, entropy), weight)
    assert float(gradient[VOCAB:].abs().max()) == 0
    assert float(gradient[:VOCAB].abs().max()) > 0


def test_entropy_alone_and_logp_alone_have_their_own_gradients(group: Any) -> None:
    for pick in (0, 1):
        hidden, weight, labels = inputs(4)
        scores = token_logprobs(hidden, weight, labels, group=group, vocab_size=VOCAB, temperature=1.0, chunk=3)
        log_p = (hidden @ weight[:VOCAB].t()).log_softmax(-1)
        wanted = (log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
        torch.testing.assert_close(
            torch.autograd.grad(scores[pick].sum(), hidden)[0], torch.autograd.grad(wanted[pick].sum(), hidden)[0]
        )


def test_sharp_distributions_stay_finite(group: Any) -> None:
    """Logits of thousands: the entropy is 0 and a log-prob far below any float32 probability."""
    hidden, weight, labels = inputs(6, scale=2000.0)
    logp, entropy = token_logprobs(hidden, weight, labels, group=group, vocab_size=VOCAB, temperature=0.5, chunk=4)
    wanted = expected(hidden, weight, labels, 0.5)
    assert float(wanted[0].min()) < -1000
    torch.testing.assert_close(logp.double(), wanted[0], rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=1e-3, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss(logp, entropy), (hidden, weight)))


def test_no_rows_give_no_values_and_zero_gradients(group: Any) -> None:
    hidden, weight, labels = inputs(0)
    logp, entropy = token_logprobs(hidden, weight, labels, group=group, vocab_size=VOCAB, temperature=1.0, chunk=4)
    assert logp.shape == entropy.shape == (0,)
    gradients = torch.autograd.grad(logp.sum() + entropy.sum(), (hidden, weight))
    assert gradients[0].shape == (0, HIDDEN) and torch.equal(gradients[1], torch.zeros(PADDED, HIDDEN))


def test_scores_of_bf16_are_not_rounded(group: Any) -> None:
    """Logits of up to 30, which bf16 would round to multiples of 1/8."""
    hidden, weight, labels = inputs(50, scale=5.0)
    hidden, weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
    logp, entropy = token_logprobs(hidden, weight, labels, group=group, vocab_size=VOCAB, temperature=1.0, chunk=3)
    assert logp.dtype == entropy.dtype == torch.float32
    wanted = expected(hidden, weight, labels, 1.0)
    torch.testing.assert_close(logp.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=1e-5, atol=1e-5)
    rounded = (hidden @ weight[:VOCAB].t()).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert float((logp - rounded).abs().max()) > 0.01


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor any operation makes, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.num_operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.num_operations += 1
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), 0)
        return result


def test_logits_exist_for_one_chunk_at_a_time(group: Any) -> None:
    """512 rows, 1000 words, chunks of 16: no tensor is larger than 16 * 1000, in either pass."""
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    labels = torch.randint(0, 1000, (512,))
    with LargestTensor() as forward:
        logp, entropy = token_logprobs(hidden, weight, labels, group=group, vocab_size=1000, temperature=1.0, chunk=16)
    with LargestTensor() as backward:
        (logp.sum() + entropy.sum()).backward()
    for seen in (forward, backward):
        assert seen.num_operations > 512 / 16
        assert seen.numel == 16 * 1000
