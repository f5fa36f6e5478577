"""What is read from a Hugging Face config.json, and that what is not understood is refused by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_families import FAMILIES, tiny_config

from rlmegatron.models.rope import Rope
from rlmegatron.models.table import architecture_of, read_architecture

LLAMA, MISTRAL, QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
QWEN3, QWEN3_MOE, MIXTRAL = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"
V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_transformers_writes_what_is_read(tmp_path: Path) -> None:
    """Also the head size that is not hidden size / heads, and the KV heads."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=40, num_hidden_layers=3, vocab_size=50,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0}, tie_word_embeddings=True, rms_norm_eps=3e-6,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    arch = read_architecture(str(tmp_path))
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (3, 96, 4, 2, 40)
    assert (arch.vocab_size, arch.rope, arch.tied_embeddings, arch.norm_eps) == (50, Rope(12345.0), True, 3e-6)
    assert arch.qk_norm and not arch.qkv_bias


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a whole number above 0, got 0"),
        ({"hidden_size": 8.0}, "hidden_size must be a whole number above 0, got 8.0"),
        ({"vocab_size": True}, "vocab_size must be a whole number above 0, got True"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number above 0, got None"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a whole number above 0, got '4'"),
        ({"intermediate_size": -12}, "intermediate_size must be a whole number above 0, got -12"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be a whole number above 0, got None"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps (must be a number above 0, got|=) '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps (must be a number above 0, got|=) nan"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings must be true or false, got 'true'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported; supported: False"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported; supported: 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_interleaved": True}, "rope_interleaved = True is not supported"),
        ({"use_mrope": True}, "use_mrope = True is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True is not supported"),
        ({"tie_encoder_decoder": True}, "tie_encoder_decoder = True is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ({"pruned_heads": {"1": [0]}}, r"pruned_heads = \{'1': \[0\]\} is not supported; supported: \{\}"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads \(4\)"),
        ({"layer_types": ["sliding_attention"] * 4}, r"layer_types = \['sliding_|not understood: layer_types = "),
        ({"logit_scale": 0.5}, "not understood: logit_scale = 0.5. Such a key may change the model's numbers"),
        ({"attention_chunk_size": 8, "clip_qkv": 8}, "not understood: attention_chunk_size = 8, clip_qkv = 8"),
        ({"original_max_position_embeddings": 16}, "not understood: original_max_position_embeddings = 16"),
        ({"is_causal": False}, "not understood: is_causal = False"),
    ],
)  # fmt: skip
def test_every_family_refuses_what_is_not_built(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: ({message})"):
        architecture_of(tiny_config(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (LLAMA, {"head_dim": 5}, r"head_dim \(5\) must be even"),
        (LLAMA, {"head_dim": None, "hidden_size": 9}, r"no head_dim, and hidden_size \(9\) / num_attention_heads"),
        (LLAMA, {"sliding_window": 32}, "not understood: sliding_window = 32"),
        (MISTRAL, {"sliding_window": 63}, r"sliding_window = 63 is shorter than max_position_embeddings \(64\)"),
        (MISTRAL, {"sliding_window": "4096"}, "sliding_window must be a whole number above 0, got '4096'"),
        (MISTRAL, {"use_sliding_window": False}, "not understood: use_sliding_window = False"),
        (MIXTRAL, {"sliding_window": 32}, "sliding_window = 32 is shorter than"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 32}, "sliding_window = 32 is shorter than"),
        (QWEN3, {"use_sliding_window": True, "max_position_embeddings": 8192}, "sliding_window = 4096 is shorter"),
        (QWEN3, {"use_sliding_window": "no"}, "use_sliding_window must be true or false, got 'no'"),
        (QWEN3, {"layer_types": "full_attention"}, "layer_types = 'full_attention' is not supported"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts must be a whole number above 0, got 0"),
        (QWEN3_MOE, {"num_local_experts": 4}, "num_local_experts = 4 is not supported; supported: 8"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) exceeds the 8 experts to choose from"),
        (QWEN3_MOE, {"mlp_only_layers": [4]}, r"mlp_only_layers must be a list of layers below 4, got \[4\]"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers below 4, got 1"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8}, "not understood: shared_expert_intermediate_size = 8"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        (MIXTRAL, {"num_local_experts": 1}, r"num_experts_per_tok \(2\) exceeds the 1 experts"),
        (V2, {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05 is not supported; supported: 1e-06"),
        (V2, {"num_key_value_heads": 2}, r"num_key_value_heads \(2\) must be num_attention_heads \(4\)"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported; supported: 'softmax'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True is not supported; supported: False"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported; supported: greedy, group_lim"),
        (V2, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group must be a whole number above 0, got N"),
        (V2, {"n_shared_experts": None}, "n_shared_experts must be a whole number from 0, got None"),
        (V2, {"num_nextn_predict_layers": 1}, "not understood: num_nextn_predict_layers = 1"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported; supported: 1"),
        (V2, {"q_lora_rank": 0}, "q_lora_rank must be a whole number above 0, got 0"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; supported: 'sigmoid'"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported; supported: 'noaux_tc'"),
        (V3, {"rope_interleave": False}, "rope_interleave = False is not supported; supported: True"),
        (V3, {"qk_rope_head_dim": 3}, r"qk_rope_head_dim \(3\) must be even"),
        (V3, {"head_dim": 5}, "head_dim = 5 is not supported; supported: 2"),
        (V3, {"qk_head_dim": 6}, "qk_head_dim = 6 is not supported; supported: 5"),
        (V3, {"first_k_dense_replace": 4}, "first_k_dense_replace must be from 0 to 3, got 4"),
        (V3, {"first_k_dense_replace": None}, "first_k_dense_replace must be a whole number from 0, got None"),
        (V3, {"routed_scaling_factor": 0}, "routed_scaling_factor must be a number above 0, got 0"),
        (V3, {"n_group": 3}, r"n_group \(3\) must divide n_routed_experts \(8\)"),
        (V3, {"topk_group": 5}, r"n_group \(4\) must .* be at least topk_group \(5\)"),
        (V3, {"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) exceeds the 4 experts to choose from"),
        (V3, {"n_group": 8, "topk_group": 8}, r"n_group \(8\) leaves less than 2 experts a group"),
        (V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a whole number from 0, got -1"),
        (V3, {"num_local_experts": 4}, "num_local_experts = 4 is not supported; supported: 8"),
        (V3, {"index_topk": 2048}, "not understood: index_topk = 2048"),
    ],
)  # fmt: skip
def test_each_family_refuses_what_it_cannot_be(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: {message}"):
        architecture_of(tiny_config(family, **changes))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "method 'awq' is not supported; supported: 'fp8'"),
        ({"quant_method": "gptq"}, "method 'gptq'"),
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "method 'compressed-tensors'"),
        ({"bits": 4}, "method None is not supported"),
        ("fp8", "method 'fp8' is not supported"),
        ({**FP8, "fmt": "e5m2"}, "needs fmt 'e4m3' and a weight_block_size of two numbers, it has 'e5m2'"),
        ({**FP8, "weight_block_size": None}, "a weight_block_size of two numbers, it has 'e4m3' and None"),
        ({**FP8, "weight_block_size": [128]}, r"a weight_block_size of two numbers, it has 'e4m3' and \[128\]"),
        ({**FP8, "weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]; use two whole numbers"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme = 'static' is not supported; supported: 'dynamic'"),
        ({**FP8, "kv_cache_scheme": {"num_bits": 8}}, r"not understood: kv_cache_scheme = \{'num_bits': 8\}"),
    ],
)
def test_other_quantisations_are_refused(quantization: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: quantization_config.*{message}"):
        architecture_of(tiny_config(QWEN3, quantization_config=quantization))


@pytest.mark.parametrize(
    "extra", [{}, {"scale_fmt": "ue8m0"}, {"modules_to_not_convert": ["lm_head"], "dequantize": False}]
)
def test_fp8_in_blocks_is_read_for_any_family(extra: dict[str, Any]) -> None:
    arch = architecture_of(tiny_config(QWEN3_MOE, quantization_config={**FP8, **extra}))
    assert arch.fp8_block == (128, 128)
    assert arch.exported_keys == (("quantization_config", None),)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_and_harmless_keys_change_nothing(family: str) -> None:
    harmless = {"unknown": None, "torch_dtype": "float16", "use_cache": False, "max_length": 20, "pretraining_tp": 2}
    config = tiny_config(family)
    assert architecture_of({**config, **harmless, "attention_bias": None}) == architecture_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: Llama"),
        ({"architectures": None}, r"architectures is None; it must be a list of one name, as \['Qwen3ForCausalLM'\]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; it must be a list"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, r"architectures is \['LlamaForCausalLM', 'X'\]; it must be"),
        ({"hidden_size": 0}, "hidden_size must be a whole number above 0, got 0"),
        ({"some_new_key": 3}, "not understood: some_new_key = 3"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config of method 'awq'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
    ],
)  # fmt: skip
def test_an_error_names_the_file(make_model: Any, changes: dict[str, Any], message: str) -> None:
    directory = make_model(**changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_architecture(str(directory))
    assert str(caught.value).startswith(f"{directory}/config.json: ")


@pytest.mark.parametrize("text", ['{"architectures": ["Llama', "[]", "3", "{,}"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"cannot be read as JSON|it must hold a JSON object") as caught:
        read_architecture(str(tmp_path))
    assert str(caught.value).startswith(f"{path} ")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json does not exist; {tmp_path} must be a Hugging Face"):
        read_architecture(str(tmp_path))


def test_a_config_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(json.dumps({"architectures": ["ä"]}, ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json cannot be read as JSON: .*utf-8"):
        read_architecture(str(tmp_path))
