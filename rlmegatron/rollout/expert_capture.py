"""Lets SGLang tell which experts it chose on a CPU, where the table it keeps them in cannot be pinned.

In: nothing; called in a scheduler process without CUDA, before the model is loaded. Out: the table lies in ordinary
memory; SGLang itself would register it with a CUDA runtime that is not there, and end. Must never be called where there
is a CUDA device.
"""

from __future__ import annotations

from typing import Any


def install_expert_capture() -> None:
    """Give 'cpu' an allocation of its own; the choices themselves are caught on any device alike."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    def in_ordinary_memory(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
        del pin_memory
        return allocator.allocate(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = in_ordinary_memory
