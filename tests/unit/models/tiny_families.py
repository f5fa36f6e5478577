"""One tiny config.json per family, as dictionaries, and random checkpoints of what they describe.

In: a family's name. Out: configs, architectures, tensors. Every size can be cut four ways, but the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.table import architecture_of

BASE: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "head_dim": 6,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": 4},
    "MistralForCausalLM": {"sliding_window": None, "num_key_value_heads": 1},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [1],
    },
    "MixtralForCausalLM": {"num_local_experts": 8},
    "DeepseekV2ForCausalLM": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {**LATENT, "q_lora_rank": 3, "first_k_dense_replace": 3},
}


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "architectures": [name], **FAMILIES[name], **changes}


def tiny_architecture(name: str, **changes: Any) -> Architecture:
    return architecture_of(tiny_config(name, **changes))


def random_tensors(arch: Architecture) -> dict[str, Tensor]:
    """A random checkpoint: Hugging Face name -> tensor."""
    generator = torch.Generator().manual_seed(0)
    parts = {part.name: part.shape for rule in arch.parameter_rules(1) for part in rule.parts}
    return {name: torch.randn(shape, generator=generator) for name, shape in parts.items()}
