"""Qwen2 and Qwen2.5: Llama with biases on Q, K and V; small sizes tie their embeddings."""

from __future__ import annotations

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, refuse_windows
from rlmegatron.models.decoder_rules import decoder_rules


def read(keys: ConfigKeys) -> Architecture:
    """Defaults of transformers' Qwen2Config: 32 KV heads; a window of 4096 that is off."""
    refuse_windows(keys, default=4096, has_switch=True)
    return Architecture(**decoder_fields(keys, kv_heads=32), qkv_bias=True, rules=decoder_rules)
