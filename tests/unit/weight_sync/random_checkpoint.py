"""Random checkpoints of small architectures, as SGLang and the learner see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.table import FAMILIES


def architecture(name: str, **changes: Any) -> Architecture:
    config: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": 70,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 3,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    return FAMILIES[name]({**config, **changes})


def checkpoint(arch: Architecture) -> dict[str, Tensor]:
    """Hugging Face name -> random tensor; tied heads are absent, as in a file."""
    generator = torch.Generator().manual_seed(0)
    parts = [part for rule in arch.parameter_rules(1) if not rule.copy for part in rule.parts]
    return {part.name: torch.randn(part.shape, generator=generator) for part in parts}
