"""An engine in memory that places Hugging Face tensors as SGLang's weight loaders do, written as plain loops.

In: whole tensors. Out: the parameters of every engine rank. Must never use `weight_sync.engine_layout`, which is
checked against it, as it is against SGLang itself in `test_engine_layout_in_sglang.py`.
"""

from __future__ import annotations

import importlib
import re
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
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
}
STACKED = {
    "gate_proj": ("w13_weight", 0),
    "w1": ("w13_weight", 0),
    "up_proj": ("w13_weight", 1),
    "w3": ("w13_weight", 1),
    "down_proj": ("w2_weight", 0),
    "w2": ("w2_weight", 0),
}
GATED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
PER_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj")


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    missing = list(tensor.shape)
    missing[dim] = size - tensor.shape[dim]
    return torch.cat([tensor, torch.zeros(missing)], dim)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def home_of(name: str, arch: Architecture) -> tuple[str, tuple[int, int]]:
    """(parameter, place in it): the number of the expert, or 0, and which part of a fused parameter."""
    module = name.split(".")[-2]
    expert = re.match(r"(.+\.experts)\.(\d+)\.", name)
    if expert:
        parameter, part = STACKED[module]
        return f"{expert[1]}.{parameter}", (int(expert[2]), part)
    if arch.latent and (module == "q_proj" or (module == "kv_a_proj_with_mqa" and arch.latent.q_rank is None)):
        return name, (0, 0)
    fused, part = FUSED.get(module, (module, 0))
    return name.replace(f".{module}.", f".{fused}."), (0, part)


def holders(name: str, arch: Architecture, *, tp: int, ep: int) -> list[int]:
    """The ranks that share a tensor: those of the part that has the expert, or all."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if expert is None:
        return list(range(tp))
    assert arch.experts is not None
    experts, ranks = (torch.arange(count).chunk(ep) for count in (arch.experts.num, tp))
    return next(part.tolist() for part, held in zip(ranks, experts, strict=True) if int(expert[1]) in held)


def share_of(
    name: str, tensor: Tensor, arch: Architecture, *, tp: int, rank: int, ep: int = 1, on_cpu: bool = True
) -> Tensor:
    """What rank `rank` of `tp`, one of the tensor's holders, keeps of it, with its padding."""
    module, sharers = name.split(".")[-2], holders(name, arch, tp=tp, ep=ep)
    dim = 1 if module in ("o_proj", "down_proj", "w2") else 0
    if module in ("embed_tokens", "lm_head"):
        multiple = 64 if round_up(len(tensor), 64) % tp == 0 else 64 * tp
        return padded(tensor, 0, round_up(len(tensor), multiple)).chunk(tp)[rank]
    if module in ("k_proj", "v_proj") and not on_cpu and tp >= arch.num_kv_heads:
        return tensor.split(arch.head_dim)[rank // (tp // arch.num_kv_heads)]
    if module in ("k_proj", "v_proj") or module in PER_HEAD:
        is_kv = module in ("k_proj", "v_proj")
        heads, per_kv = (arch.num_kv_heads, 1) if is_kv else (arch.num_heads, arch.num_heads // arch.num_kv_heads)
        wanted = round_up(arch.num_kv_heads, tp) * per_kv if on_cpu else heads
        return padded(tensor, dim, tensor.shape[dim] // heads * wanted).chunk(tp, dim)[rank]
    if module in GATED:
        count = arch.experts.shared_ffn // arch.experts.ffn if arch.experts and ".shared_experts." in name else 1
        each = tensor.shape[dim] // count
        each = round_up(each, 32 * tp) if on_cpu else each
        return padded(tensor, dim, each * count).chunk(len(sharers), dim)[sharers.index(rank)]
    return tensor


class LoadingEngine:
    """`parameters(rank)` by SGLang's names; `spoil` = (rank, parameter) is changed by one bit after each load."""

    def __init__(
        self,
        arch: Architecture,
        *,
        tensor: int,
        expert: int = 1,
        on_cpu: bool = True,
        fails_at_bucket: int | None = None,
    ) -> None:
        self.arch, self.tensor, self.expert, self.on_cpu = arch, tensor, expert, on_cpu
        self.fails_at_bucket = fails_at_bucket
        self.parts: list[dict[str, dict[tuple[int, int], Tensor]]] = [{} for _ in range(tensor)]
        self.num_buckets = 0
        self.spoil: tuple[int, str] | None = None

    def parameters(self, rank: int) -> dict[str, Tensor]:
        found = {}
        for name, parts in self.parts[rank].items():
            experts = sorted({expert for expert, _ in parts})
            fused = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in experts]
            found[name] = torch.stack(fused) if ".experts." in name else fused[0]
        return found

    def derived(self, rank: int) -> dict[str, Tensor]:
        """What SGLang decodes with instead of `kv_b_proj`."""
        found, latent = {}, self.arch.latent
        for name, tensor in self.parameters(rank).items():
            if name.endswith(".kv_b_proj.weight"):
                assert latent is not None
                heads = torch.stack(tensor.split(latent.nope_dim + latent.value_dim))
                path = name.removesuffix(".kv_b_proj.weight")
                found[f"{path}.w_kc"] = heads[:, : latent.nope_dim]
                found[f"{path}.w_vc"] = heads[:, latent.nope_dim :].mT
        return found

    def update_weights(self, named_tensors: Sequence[tuple[str, Any]], *, load_format: str | None = None) -> None:
        if load_format is not None:
            self._hand_to(load_format, named_tensors)
            return
        if self.num_buckets == self.fails_at_bucket:
            raise RuntimeError(f"bucket {self.num_buckets} was refused")
        self.num_buckets += 1
        for name, tensor in named_tensors:
            parameter, place = home_of(name, self.arch)
            cut: dict[str, Any] = {"tp": self.tensor, "ep": self.expert}
            for rank in holders(name, self.arch, **cut):
                share = share_of(name, tensor, self.arch, rank=rank, on_cpu=self.on_cpu, **cut).clone()
                self.parts[rank].setdefault(parameter, {})[place] = share

    def _hand_to(self, loader: str, named_tensors: Sequence[tuple[str, Any]]) -> None:
        """Each rank gets its own item of every list."""
        module, function = loader.rsplit(".", 1)
        for rank in range(self.tensor):
            parameters, derived = self.parameters(rank), self.derived(rank)
            if self.spoil is not None and self.spoil[0] == rank:
                spoiled = {**parameters, **derived}[self.spoil[1]]
                spoiled.view(torch.int32)[(-1,) * spoiled.dim()] ^= 1
            model = SimpleNamespace(named_parameters=parameters.items)
            for path, tensor in derived.items():
                attach(model, path, tensor)
            payload = [(name, values[rank]) for name, values in named_tensors]
            getattr(importlib.import_module(module), function)(model, payload)


def attach(model: SimpleNamespace, path: str, tensor: Tensor) -> None:
    *modules, name = path.split(".")
    for module in modules:
        if not hasattr(model, module):
            setattr(model, module, SimpleNamespace())
        model = getattr(model, module)
    setattr(model, name, tensor)
