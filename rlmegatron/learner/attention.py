"""Attention and RMSNorm for Megatron's layer specs: what the local ones lack where Transformer Engine is absent.

In: packed queries, keys and values [T, heads, head size] with cumulative lengths. Out: the same attention that
Transformer Engine's `thd` format computes. Exact, not approximate; must never look at the config beyond its sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019) whose gradient Megatron sums when the sequence is cut over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape as `hidden`."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(nn.Module):
    """Causal grouped-query attention over packed sequences through `scaled_dot_product_attention`.

    Sequences are padded on the right in buckets of similar length: with a causal mask no real query sees a pad key, so
    no mask is needed and the result is exact. A bucket holds at most `attention_chunk` padded tokens (or one sequence).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        attention_chunk: int,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.attention_chunk, self.softmax_scale = attention_chunk, softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """[T, heads, head size] each -> [T, heads * value size]."""
        assert packed_seq_params is not None, "PackedAttention takes packed sequences only"
        buckets = length_buckets(packed_seq_params.cu_seqlens_q, self.attention_chunk)
        outputs = [self._attend(query[rows], key[rows], value[rows], keep) for rows, keep in buckets]
        order = torch.cat([rows[keep] for rows, keep in buckets])
        flat = torch.cat(outputs)
        return torch.empty_like(flat).index_copy(0, order, flat).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
        """[N, L, heads, size] padded on the right, keep [N, L] -> the kept rows."""
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)[keep]


class LatentAttention(MLASelfAttention):
    """Multi-head latent attention of exactly the modules that its layer spec names.

    From 0.19 on, Megatron-Core puts a norm before queries that are not compressed, which no published model has.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def length_buckets(cu_seqlens: Tensor, chunk: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences sorted by length and grouped: rows [N, L] into the packed tensor and which of them are real [N, L]."""
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    order = torch.argsort(lengths, stable=True)
    buckets: list[tuple[Tensor, Tensor]] = []
    members: list[int] = []
    sizes = lengths.tolist()
    for index in order.tolist():
        if members and ((len(members) + 1) * sizes[index] > chunk or sizes[index] > 2 * sizes[members[0]]):
            buckets.append(_bucket(starts, lengths, members))
            members = []
        if sizes[index]:
            members.append(index)
    if members:
        buckets.append(_bucket(starts, lengths, members))
    return buckets


def _bucket(starts: Tensor, lengths: Tensor, members: list[int]) -> tuple[Tensor, Tensor]:
    index = torch.tensor(members, device=starts.device)
    offsets = torch.arange(int(lengths[members[-1]]), device=starts.device)
    keep = offsets < lengths[index, None]
    # A pad slot repeats the sequence's first row: any valid row will do, no real query attends to it.
    return starts[index, None] + offsets * keep, keep
