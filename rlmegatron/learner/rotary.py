"""Rotary embeddings with the frequencies of the architecture, put where Megatron keeps its own.

In: a built chunk. Out: the same chunk with our frequencies. Megatron's own scalings know Llama 3.1's constants only,
and YaRN under other names for each kind of attention.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from rlmegatron.models.architecture import Architecture


class LatentRotary(RotaryEmbedding):
    """What latent attention asks of its rotary embedding: angles [L 1 1 D] and a factor on their cosine and sine."""

    def __init__(self, dim: int, *, base: float, factor: float, cp_group: Any) -> None:
        super().__init__(dim, 1.0, rotary_base=base, cp_group=cp_group)
        self.factor = factor

    def forward(self, max_seq_len: int, *_: Any, **__: Any) -> tuple[Tensor, float]:
        """Angles of positions 0 to `max_seq_len` - 1, and the factor."""
        # Megatron keeps the angles of every length it has seen.
        return super().forward(max_seq_len, packed_seq=True), self.factor


def set_rotary(chunk: Any, arch: Architecture, cp_group: Any) -> None:
    """Give `chunk`, a GPT model, the frequencies of `arch`; its latent attention layers share one embedding."""
    frequencies = arch.rope.inverse_frequencies(arch.rotary_dim)
    if arch.latent is None:
        chunk.rotary_pos_emb.inv_freq = frequencies
        return
    rotary = LatentRotary(
        arch.latent.rope_dim, base=arch.rope.base, factor=arch.rope.attention_factor, cp_group=cp_group
    )
    rotary.inv_freq = frequencies
    for layer in chunk.decoder.layers:
        layer.self_attention.rotary_pos_emb = rotary
