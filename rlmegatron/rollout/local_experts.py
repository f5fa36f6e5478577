"""Lets SGLang spread experts over the ranks of an engine on a CPU, where it counts on kernels that most CPUs lack.

In: nothing; called in a scheduler process without CUDA, before the first request. Out: a rank computes the experts it
holds. SGLang's plain version of the layer takes the number of all others, -1, for an index, and ends the scheduler.
Must never be called where there is a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch


def install_local_experts() -> None:
    """Hand the plain version one row for each token and expert of this rank, and add a token's rows up."""
    from sglang.srt.layers.moe import fused_moe_native

    plain = fused_moe_native.moe_forward_native

    def of_local_experts(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> Any:
        if layer.moe_ep_size == 1:
            return plain(layer, x, topk_output, config)
        token, place = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
        if not len(token):
            return torch.zeros_like(x)
        numbers, weights = (
            table[token, place].unsqueeze(1) for table in (topk_output.topk_ids, topk_output.topk_weights)
        )
        one_each = topk_output._replace(topk_ids=numbers, topk_weights=torch.ones_like(weights))
        rows = plain(layer, x[token], one_each, config) * weights
        return torch.zeros(x.shape, dtype=rows.dtype).index_add_(0, token, rows).to(x.dtype)

    fused_moe_native.moe_forward_native = of_local_experts
