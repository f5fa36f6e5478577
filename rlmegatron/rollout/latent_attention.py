"""Lets DeepSeek's latent attention run on SGLang's torch_native backend, which a CPU without AMX has to use.

In: nothing; called in a scheduler process without CUDA, before the first request. Out: prompts take the absorbed form
of latent attention that decoding takes anyway; the other reads the latent cache as keys and values, and ends the
scheduler. Must never be called where there is a CUDA device.
"""

from __future__ import annotations

from typing import Any


def install_latent_attention() -> None:
    """Register a handler for 'torch_native', which has none of its own and falls back to Triton's."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    def absorbed(_attention: Any, _forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register("torch_native", absorbed)
