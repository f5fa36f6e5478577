"""What the config.json that engines read must say beyond the model's own.

In: the parsed config.json and its architecture. Out: keys to set, none of which changes a number. Pure; must never
import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmegatron.models.architecture import Architecture


def keys_for_engines(config: Mapping[str, Any], arch: Architecture, *, on_cpu: bool) -> dict[str, Any]:
    """Keys that SGLang asks for and transformers 5 leaves out; on a CPU, rope scaling by 1 for latent attention.

    There SGLang builds latent attention with YaRN alone (rotary_embedding/factory.py, get_rope_cpu).
    """
    found = {key: value for key, value in arch.engine_keys if key not in config}
    if on_cpu and arch.latent and arch.rope.kind == "default":
        scaling = {"factor": 1.0, "original_max_position_embeddings": arch.max_positions}
        if "rope_parameters" in config:
            found["rope_parameters"] = {"rope_type": "yarn", "rope_theta": arch.rope.base, **scaling}
        else:
            found["rope_scaling"] = {"type": "yarn", **scaling}
    return found
