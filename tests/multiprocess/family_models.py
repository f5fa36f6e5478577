"""One tiny random Hugging Face model per shape that a family can take, and what transformers makes of some tokens.

In: a directory. Out: model directories by variant, and reference logits. Runs in a rank; must never use the mapping,
which is what it is compared with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES = {
    "vocab_size": 37,  # no tensor-parallel size divides it
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 8, "beta_slow": 1}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "llama-3-tied-1-kv-head": (
        "Llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "mistral": ("Mistral", {"head_dim": 10, "sliding_window": None}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-tied": ("Qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 18, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 18, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**EXPERTS, "mlp_only_layers": [3], "decoder_sparse_step": 2, "num_key_value_heads": 1},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 16,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 16,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "deepseek-v3-3-dense": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
        },
    ),
}
LENGTHS = (5, 1, 40, 23)  # the third and fourth are longer than the original context of the scaled variants


def has_experts(variant: str) -> bool:
    """Whether some layer has experts."""
    return VARIANTS[variant][0] in ("Qwen3Moe", "Mixtral", "DeepseekV2", "DeepseekV3")


def sequences() -> list[list[int]]:
    """Token ids of every sequence."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]


def write_families(directory: Path) -> None:
    """`directory`/variant: weights large enough that every one of them matters."""
    for variant in VARIANTS:
        write_variant(directory / variant, variant)


def write_variant(directory: Path, variant: str, **changes: Any) -> None:
    import transformers

    family, extra = VARIANTS[variant]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **extra, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
            elif name.endswith("weight") and tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif "inv_freq" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.12)
    model.save_pretrained(directory)
    config_json = json.loads((directory / "config.json").read_text())
    config_json["kept_by_export"] = None
    (directory / "config.json").write_text(json.dumps(config_json))
    (directory / "tokenizer.json").write_text("{}")


def reference_logits(directory: str) -> Tensor:
    """[tokens of all sequences, vocabulary] fp32, each sequence on its own."""
    model = load_reference(directory)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokens])).logits[0] for tokens in sequences()])


def load_reference(directory: str) -> Any:
    """The Hugging Face model in fp32, in plain code."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if type(module).__name__ == "DeepseekV2Moe":  # transformers 5.12 reads this and never sets it
            module.num_experts = model.config.n_routed_experts
    return model


def family_references(directory: Path) -> dict[str, Tensor]:
    """Variant -> `reference_logits` of the models that `write_families` left in `directory`."""
    return {variant: reference_logits(str(directory / variant)) for variant in VARIANTS}
