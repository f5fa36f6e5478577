"""What the config.json that engines read must say beyond the model's own.

In: the parsed config.json and its architecture. Out: keys to set, none of which changes a number. Pure; must never
import torch or sglang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmegatron.models.architecture import Architecture


def keys_for_engines(config: Mapping[str, Any], arch: Architecture, *, on_cpu: bool) -> dict[str, Any]:
    """Keys that SGLang asks for and transformers 5 leaves out, and those that it would read otherwise."""
    found = {key: value for key, value in arch.engine_keys if key not in config}
    found |= _rope_keys(config, arch, on_cpu=on_cpu)
    if arch.experts and arch.experts.num_groups == 1 and config.get("n_group") not in (None, 1):
        found |= {"n_group": 1, "topk_group": 1}  # SGLang limits the choice by groups whatever topk_method says
    return found


def _rope_keys(config: Mapping[str, Any], arch: Architecture, *, on_cpu: bool) -> dict[str, Any]:
    """SGLang wants linear scaling's factor as a float, and on a CPU builds latent attention with YaRN alone.

    There scaling by 1 stands in for none (rotary_embedding/factory.py, get_rope_cpu).
    """
    name = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    if arch.rope.kind == "linear":
        return {name: {**config[name], "factor": arch.rope.factor}}
    if not (on_cpu and arch.latent and arch.rope.kind == "default"):
        return {}
    scaling = {"factor": 1.0, "original_max_position_embeddings": arch.max_positions}
    if name == "rope_parameters":
        return {name: {"rope_type": "yarn", "rope_theta": arch.rope.base, **scaling}}
    return {name: {"type": "yarn", **scaling}}
