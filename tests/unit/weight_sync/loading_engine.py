"""An engine in memory that places Hugging Face tensors as SGLang's weight loaders do, written as plain loops.

In: whole tensors. Out: the parameters of every engine rank. Must never use `weight_sync.engine_layout`, which is
checked against it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture

FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def share_of(name: str, tensor: Tensor, arch: Architecture, *, tp: int, rank: int) -> Tensor:
    """What rank `rank` of `tp` keeps of one tensor."""
    if "embed_tokens" in name or "lm_head" in name:
        padding = 64
        if -(-len(tensor) // padding) * padding % tp:
            padding *= tp
        padded = torch.zeros(-(-len(tensor) // padding) * padding, tensor.shape[1])
        padded[: len(tensor)] = tensor
        return padded.chunk(tp)[rank]
    if "norm" in name:
        return tensor
    if "k_proj" in name or "v_proj" in name:
        heads = list(tensor.split(arch.head_dim))
        if tp >= len(heads):
            return heads[rank // (tp // len(heads))]
        return tensor.chunk(tp)[rank]
    return tensor.chunk(tp, dim=1 if "o_proj" in name or "down_proj" in name else 0)[rank]


class LoadingEngine:
    """`parameters[rank]` by SGLang's names; `spoil` = (rank, parameter) is changed by one bit after each load."""

    def __init__(self, arch: Architecture, *, tensor: int, fails_at_bucket: int | None = None) -> None:
        self.arch, self.tensor, self.fails_at_bucket = arch, tensor, fails_at_bucket
        self.parts: list[dict[str, dict[int, Tensor]]] = [{} for _ in range(tensor)]
        self.num_buckets = 0
        self.spoil: tuple[int, str] | None = None

    def parameters(self, rank: int) -> dict[str, Tensor]:
        return {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in self.parts[rank].items()}

    def update_weights(self, named_tensors: Sequence[tuple[str, Any]], *, load_format: str | None = None) -> None:
        if load_format is not None:
            self._hand_to(load_format, named_tensors)
            return
        if self.num_buckets == self.fails_at_bucket:
            raise RuntimeError(f"bucket {self.num_buckets} was refused")
        self.num_buckets += 1
        for name, tensor in named_tensors:
            module = name.split(".")[-2]
            fused, place = FUSED.get(module, (module, 0))
            for rank in range(self.tensor):
                share = share_of(name, tensor, self.arch, tp=self.tensor, rank=rank).clone()
                self.parts[rank].setdefault(name.replace(module, fused), {})[place] = share

    def _hand_to(self, loader: str, named_tensors: Sequence[tuple[str, Any]]) -> None:
        """Each rank gets its own item of every list."""
        module, function = loader.rsplit(".", 1)
        for rank in range(self.tensor):
            parameters = self.parameters(rank)
            if self.spoil is not None and self.spoil[0] == rank:
                parameters[self.spoil[1]].view(torch.int32).view(-1)[-1] ^= 1
            model = SimpleNamespace(named_parameters=parameters.items)
            payload = [(name, values[rank]) for name, values in named_tensors]
            getattr(importlib.import_module(module), function)(model, payload)
