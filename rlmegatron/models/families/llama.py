"""Llama 2 and 3: grouped-query attention, gated MLP, RMSNorm, rotary positions; no biases."""

from __future__ import annotations

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields
from rlmegatron.models.decoder_rules import decoder_rules


def read(keys: ConfigKeys) -> Architecture:
    """`attention_bias` and `mlp_bias` are refused: Megatron has no bias on the output projection alone."""
    return Architecture(**decoder_fields(keys), rules=decoder_rules)
