"""Counts of published models, from the numbers in their config.json, against the sizes of their checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from rlmegatron.config.estimate import rank_parameters
from rlmegatron.config.layout import Layout
from rlmegatron.config.model_card import ModelCard
from rlmegatron.models.card import model_card
from rlmegatron.models.table import architecture_of

_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_DEEPSEEK: dict[str, Any] = {
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = {
    **_DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = {
    **_DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
# Where the checkpoint is in bf16, the count is half of total_size in its safetensors index.
PUBLISHED = [
    (DEEPSEEK_V3, 671.0, 37.6),
    (DEEPSEEK_V2_LITE, 15.7, 2.7),
    (QWEN3_30B_A3B, 61_064_245_248 / 2e9, 3.4),
    (MIXTRAL_8X7B, 93_405_585_408 / 2e9, 12.9),
]


def card_of(config: dict[str, Any]) -> ModelCard:
    return model_card(architecture_of(config), path="m", has_chat_template=True)


@pytest.mark.parametrize(("config", "billions", "active"), PUBLISHED)
def test_parameters_are_as_many_as_published(config: dict[str, Any], billions: float, active: float) -> None:
    card = card_of(config)
    digits = 1 if billions == round(billions, 1) else 9
    assert round(card.num_parameters / 1e9, digits) == round(billions, digits)
    # With both embeddings, which some publishers leave out.
    assert round(card.active_parameters / 1e9, 1) == active


def test_what_a_policy_does_without_is_said() -> None:
    assert card_of(DEEPSEEK_V3).left_out == ("1 multi-token-prediction layer(s), which a policy does not use",)
    assert card_of(MIXTRAL_8X7B).left_out == ()


def test_stages_of_deepseek_v3_hold_all_of_it_however_the_experts_are_spread() -> None:
    card = card_of(DEEPSEEK_V3)
    layout = Layout(
        world=2048,
        tensor=1,
        pipeline=16,
        virtual_pipeline=1,
        engine_tensor=16,
        expert=64,
        expert_tensor=2,
        first_layers=4,
        last_layers=1,
    )
    held = [rank_parameters(card, layout, stage) for stage in range(16)]
    assert sum(stage.dense + 128 * stage.expert for stage in held) == card.num_parameters
    # One layer: 256 experts of three 2048 x 7168 matrices over 128 ranks.
    assert held[0].expert == held[15].expert == 256 // 64 * 3 * 2048 * 7168 // 2
    assert held[1].expert == 4 * held[0].expert
