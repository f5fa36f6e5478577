"""Products of hidden states and an output layer that are summed and kept in fp32, whatever type their factors have.

A product of bf16 matrices is otherwise rounded to bf16 at the end: a logit of 20 to a multiple of 1/8, which is more
than an update moves it. In: both factors in one type. Out: fp32. Must never communicate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fp32_product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [R H] @ weight [W H].T, [R W] fp32; as SGLang does it with `enable_fp32_lm_head`. No autograd."""
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return rows.float() @ weight.float().t()  # for bf16, only CUDA has the product above


class Fp32Linear(torch.autograd.Function):
    """`fp32_product` with gradients; they have the factors' types, as those of a linear layer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return fp32_product(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad = grad.to(rows.dtype)
        return grad @ weight, grad.t() @ rows
