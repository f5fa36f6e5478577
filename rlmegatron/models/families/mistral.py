"""Mistral: Llama with a sliding window in its first release, which is refused where it is shorter than the context."""

from __future__ import annotations

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, refuse_windows
from rlmegatron.models.decoder_rules import decoder_rules


def read(keys: ConfigKeys) -> Architecture:
    """Defaults of transformers' MistralConfig: 8 KV heads, a window of 4096."""
    refuse_windows(keys, default=4096)
    return Architecture(**decoder_fields(keys, kv_heads=8), rules=decoder_rules)
