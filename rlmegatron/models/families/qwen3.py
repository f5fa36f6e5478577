"""Qwen3: RMSNorm on every query and key head, a head size of its own, no biases."""

from __future__ import annotations

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, refuse_windows
from rlmegatron.models.decoder_rules import decoder_rules


def read(keys: ConfigKeys) -> Architecture:
    """Defaults of transformers' Qwen3Config: 32 KV heads of 128; a window of 4096 that is off."""
    refuse_windows(keys, default=4096, has_switch=True)
    return Architecture(**decoder_fields(keys, kv_heads=32, head_dim=128), qk_norm=True, rules=decoder_rules)
