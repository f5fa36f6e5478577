"""The product of bf16 factors that is not rounded, against float64, and its gradients against a linear layer's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlmegatron.learner.fp32_product import Fp32Linear, fp32_product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = [torch.bfloat16, torch.float32]


def factors(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [33 64] and weight [17 64], of products up to about 30."""
    rows, weight = torch.randn(33, 64), torch.randn(17, 64)
    return rows.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_product_is_exact_to_fp32(device: str, dtype: torch.dtype) -> None:
    rows, weight = factors(device, dtype)
    product, exact = fp32_product(rows, weight), rows.double() @ weight.double().t()
    assert product.dtype == torch.float32
    assert float((product - exact).abs().max()) < 1e-4
    assert float((exact.bfloat16() - exact).abs().max()) > 0.03, "rounding to bf16 would be seen"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_its_gradients_are_those_of_a_linear_layer(device: str, dtype: torch.dtype) -> None:
    rows, weight = (tensor.requires_grad_() for tensor in factors(device, dtype))
    towards = torch.randn(33, 17, device=device)
    found = torch.autograd.grad((Fp32Linear.apply(rows, weight) * towards).sum(), (rows, weight))
    wanted = torch.autograd.grad((F.linear(rows, weight).float() * towards).sum(), (rows, weight))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
