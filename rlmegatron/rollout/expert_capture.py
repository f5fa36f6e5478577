"""Lets SGLang tell which experts it chose where it would end instead: on a CPU, and for models such as Mixtral.

In: nothing; called in a scheduler process before the model is loaded, where experts are to be told. Out: the table of
choices lies in memory that exists, and every router knows its layer. Must never change what a router chooses.
"""

from __future__ import annotations

from typing import Any


def install_expert_capture(*, on_cpu: bool) -> None:
    """SGLang pins the table for a CUDA runtime that a CPU lacks, and Mixtral's code does not number its routers."""
    if on_cpu:
        _keep_choices_in_ordinary_memory()
    _number_routers()


def _keep_choices_in_ordinary_memory() -> None:
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def unpinned(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
        del pin_memory
        return allocator.allocate(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = unpinned


def _number_routers() -> None:
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.init_routed_experts_capturer

    def init_routed_experts_capturer(self: Any) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, TopK) and module.layer_id is None:
                module.layer_id = layer_number(name)
        original(self)

    ModelRunner.init_routed_experts_capturer = init_routed_experts_capturer


def layer_number(module: str) -> int:
    """Of a module's name.

    >>> layer_number("model.layers.17.block_sparse_moe.topk")
    17
    """
    return next(int(part) for part in module.split(".") if part.isdecimal())
