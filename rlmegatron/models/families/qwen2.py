"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V; small sizes tie their embeddings."""

from __future__ import annotations

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, refuse_windows
from rlmegatron.models.decoder_rules import decoder_rules


def read(keys: ConfigKeys) -> Architecture:
    """Defaults of transformers' Qwen2Config: 32 KV heads, no sliding window."""
    refuse_windows(keys, on_by_default=False)
    return Architecture(**decoder_fields(keys, kv_heads=32), qkv_bias=True, rules=decoder_rules)
