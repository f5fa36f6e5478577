"""Random checkpoints of small architectures of every family, as SGLang and the learner see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.table import architecture_of

_COMMON: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
_LATENT: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "head_dim": 6},
    "MistralForCausalLM": {"model_type": "mistral", "head_dim": 6, "sliding_window": None},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 6},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 6,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_routed_experts": 3,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "DeepseekV3ForCausalLM": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 20,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
}
NAMES = tuple(_FAMILIES)


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A config.json of the family as its authors publish it."""
    return {"architectures": [name], **_COMMON, **_FAMILIES[name], **changes}


def architecture(name: str, **changes: Any) -> Architecture:
    return architecture_of(config(name, **changes))


def checkpoint(arch: Architecture, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Hugging Face name -> random tensor; tied heads are absent, as in a file, and the router's bias has fp32."""
    generator = torch.Generator().manual_seed(seed)
    rules = [rule for rule in arch.parameter_rules(1) if not rule.copy]
    return {
        part.name: torch.randn(part.shape, generator=generator).to(torch.float32 if rule.keeps_fp32 else dtype)
        for rule in rules
        for part in rule.parts
    }
