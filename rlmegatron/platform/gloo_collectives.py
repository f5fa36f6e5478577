"""Collectives as the MoE token dispatcher calls them, in terms of what gloo can do.

In: the arguments of `torch.distributed`'s functions of the same names. Out: the same results. Gloo takes split sizes as
lists only, and gathers or scatters pieces of equal size only: unequal ones are filled to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
) -> Any:
    """Split sizes may be tensors or arrays."""
    return dist.all_to_all_single(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **kwargs)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The tensors of the list may differ in their first dimension."""
    if _are_alike(tensor_list):
        return dist.all_gather(tensor_list, tensor, group, async_op)
    assert not async_op, "pieces of different sizes are gathered at once"
    longest = max(len(one) for one in tensor_list)
    filled = [_filled(one, longest) for one in tensor_list]
    dist.all_gather(filled, _filled(tensor, longest), group)
    for one, found in zip(tensor_list, filled, strict=True):
        one.copy_(found[: len(one)])
    return None


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """The tensors of the list may differ in their first dimension; `output` is of the size of this rank's."""
    if _are_alike(input_list):
        return dist.reduce_scatter(output, input_list, op, group, async_op)
    assert not async_op, "pieces of different sizes are scattered at once"
    longest = max(len(one) for one in input_list)
    found = output.new_empty((longest, *output.shape[1:]))
    dist.reduce_scatter_tensor(found, torch.cat([_filled(one, longest) for one in input_list]), op, group)
    output.copy_(found[: len(output)])
    return None


def _as_list(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) <= 1


def _filled(tensor: Tensor, length: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros((length - len(tensor), *tensor.shape[1:]))])
