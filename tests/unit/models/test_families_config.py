"""config.json files of the world become the numbers that their publishers state, and no key is passed over."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tiny_families import FAMILIES, tiny_architecture, tiny_config

from rlmegatron.models.architecture import Architecture, Experts, LatentAttention
from rlmegatron.models.config_keys import _HARMLESS
from rlmegatron.models.rope import Rope
from rlmegatron.models.table import architecture_of

REAL: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("real_configs.json").read_text())
# Names of models, of which each is read: (layers, hidden, FFN, heads, KV heads, head size, vocabulary, parameters).
SIZES = {
    "Llama-2-7b-hf": (32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),
    "Llama-3.1-8B": (32, 4096, 14336, 32, 8, 128, 128256, 8_030_261_248),
    "Llama-3.2-1B": (16, 2048, 8192, 32, 8, 64, 128256, 1_235_814_400),
    "Mistral-7B-v0.3": (32, 4096, 14336, 32, 8, 128, 32768, 7_248_023_552),
    "Mistral-7B-Instruct-v0.3 as transformers 4.38 wrote it": (32, 4096, 14336, 32, 8, 128, 32768, 7_248_023_552),
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 64, 151936, 494_032_768),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 128, 152064, 7_615_616_512),
    "Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, 151936, 596_049_920),
    "Qwen3-8B": (36, 4096, 12288, 32, 8, 128, 151936, 8_190_735_360),
    "Qwen3-30B-A3B": (48, 2048, 6144, 32, 4, 128, 151936, 30_532_122_624),
    "Mixtral-8x7B-v0.1": (32, 4096, 14336, 32, 8, 128, 32000, 46_702_792_704),
    "DeepSeek-V2-Lite": (27, 2048, 10944, 16, 16, 0, 102400, 15_706_484_224),
    "DeepSeek-V2": (60, 5120, 12288, 128, 128, 0, 102400, 235_741_434_880),
    # transformers' 671,026,404,352 parameters and the router's bias of 58 layers, a buffer there.
    "DeepSeek-V3": (61, 7168, 18432, 128, 128, 0, 129280, 671_026_404_352 + 58 * 256),
    "DeepSeek-R1": (61, 7168, 18432, 128, 128, 0, 129280, 671_026_404_352 + 58 * 256),
}
TIED = {"Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen3-0.6B"}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_number_of_parameters_are_the_published_ones(name: str) -> None:
    arch = architecture_of(REAL[name])
    sizes = (arch.num_layers, arch.hidden_size, arch.ffn_size, arch.num_heads, arch.num_kv_heads, arch.head_dim)
    count = sum(prod(part.shape) for rule in arch.parameter_rules(1) if not rule.copy for part in rule.parts)
    assert (*sizes, arch.vocab_size, count) == SIZES[name]
    assert arch.tied_embeddings == (name in TIED)
    assert arch.qkv_bias == name.startswith("Qwen2") and arch.qk_norm == name.startswith("Qwen3")
    is_llama_or_mistral = name.startswith(("Llama", "Mi"))
    assert arch.norm_eps == (1e-5 if is_llama_or_mistral else 1e-6)


def test_every_real_config_is_read_or_refused() -> None:
    assert REAL.keys() - SIZES.keys() == {"Mistral-7B-v0.1"}
    with pytest.raises(ValueError, match=r"^config.json: sliding_window = 4096 is shorter than .* \(32768\)"):
        architecture_of(REAL["Mistral-7B-v0.1"])
    within = architecture_of({**REAL["Mistral-7B-v0.1"], "max_position_embeddings": 4096})
    assert within.max_positions == 4096 and within.rope == Rope(10000.0)


LLAMA3 = {"kind": "llama3", "original_positions": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"kind": "yarn", "factor": 40.0, "original_positions": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("Llama-2-7b-hf", Rope(10000.0)),
        ("Llama-3.1-8B", Rope(500000.0, factor=8.0, **LLAMA3)),  # type: ignore[arg-type]
        ("Llama-3.2-1B", Rope(500000.0, factor=32.0, **LLAMA3)),  # type: ignore[arg-type]
        ("Mistral-7B-v0.3", Rope(1e6)),
        ("Qwen2.5-7B", Rope(1e6)),
        ("Qwen3-30B-A3B", Rope(1e6)),
        ("Mixtral-8x7B-v0.1", Rope(1e6)),
        ("DeepSeek-V2-Lite", Rope(10000.0, **YARN, mscale=0.707, mscale_all_dim=0.707)),  # type: ignore[arg-type]
        ("DeepSeek-V3", Rope(10000.0, **YARN, mscale=1.0, mscale_all_dim=1.0)),  # type: ignore[arg-type]
    ],
)
def test_rotary_positions_are_the_published_ones(name: str, rope: Rope) -> None:
    assert architecture_of(REAL[name]).rope == rope


def test_experts_are_the_published_ones() -> None:
    found = {name: architecture_of(REAL[name]).experts for name in SIZES}
    assert {name for name, experts in found.items() if experts} == {
        "Qwen3-30B-A3B",
        "Mixtral-8x7B-v0.1",
        "DeepSeek-V2-Lite",
        "DeepSeek-V2",
        "DeepSeek-V3",
        "DeepSeek-R1",
    }
    assert found["Qwen3-30B-A3B"] == Experts(128, 8, 768, tuple(range(48)))
    assert found["Mixtral-8x7B-v0.1"] == Experts(8, 2, 14336, tuple(range(32)))
    assert found["DeepSeek-V2-Lite"] == Experts(64, 6, 1408, tuple(range(1, 27)), shared_ffn=2816, normalize=False)
    assert found["DeepSeek-V2"] == Experts(
        160,
        6,
        1536,
        tuple(range(1, 60)),
        shared_ffn=3072,
        normalize=False,
        scale=16.0,
        num_groups=8,
        top_groups=3,
    )
    assert found["DeepSeek-V3"] == Experts(
        256,
        8,
        2048,
        tuple(range(3, 61)),
        shared_ffn=2048,
        scoring="sigmoid",
        scale=2.5,
        num_groups=8,
        top_groups=4,
        group_best=2,
        bias=True,
    )


def test_latent_attention_is_the_published_one() -> None:
    assert architecture_of(REAL["DeepSeek-V2-Lite"]).latent == LatentAttention(None, 512, 128, 64, 128)
    v3 = architecture_of(REAL["DeepSeek-V3"])
    assert v3.latent == LatentAttention(1536, 512, 128, 64, 128)
    # 192 ** -0.5 times (0.1 ln 40 + 1) ** 2, as in DeepSeek's own code.
    assert v3.softmax_scale == pytest.approx(0.13523377886)


def test_what_deepseek_v3_is_read_without() -> None:
    """The prediction layer is dropped by its names, the quantisation on the way in; exported configs say so."""
    arch = architecture_of(REAL["DeepSeek-V3"])
    assert arch.fp8_block == (128, 128)
    assert arch.exported_keys == (("num_nextn_predict_layers", 0), ("quantization_config", None))
    assert arch.dropped == (
        (r"model\.layers\.(61)\..+", "1 multi-token-prediction layer(s), which a policy does not use"),
    )
    assert architecture_of({**REAL["DeepSeek-V3"], "num_nextn_predict_layers": 0}).dropped == ()


@pytest.mark.parametrize("name", SIZES)
def test_transformers_5_says_the_same_in_its_own_words(name: str) -> None:
    """It writes `rope_parameters`, `dtype` and every key of its config class."""
    import transformers

    config = {key: value for key, value in REAL[name].items() if key not in ("quantization_config", "auto_map")}
    kind = config["architectures"][0].replace("ForCausalLM", "Config")
    written = json.loads(getattr(transformers, kind)(**copy.deepcopy(config)).to_json_string())
    assert "rope_parameters" in written and "rope_theta" not in written
    assert architecture_of(written) == architecture_of(config)


def mutated(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one value changed at a time: (key, config)."""
    other = {"silu": "gelu", "default": "dynamic", "yarn": "linear", "softmax": "sigmoid", "sigmoid": "softmax"}
    for key, value in config.items():
        if isinstance(value, dict):
            for inner, changed in mutated(value):
                yield f"{key}.{inner}", {**config, key: changed}
        elif isinstance(value, bool):
            yield key, {**config, key: not value}
        elif isinstance(value, (int, float)):
            yield key, {**config, key: value * 2 + 1}
        elif isinstance(value, str):
            yield key, {**config, key: other.get(value, value + "x")}
        elif isinstance(value, list):
            yield key, {**config, key: [*value[1:], "sliding_attention"]}
        else:
            yield key, {**config, key: 3}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_writes_is_passed_over(family: str) -> None:
    """Another value of any key gives another architecture or an error, unless no forward pass depends on it."""
    import transformers

    kind = getattr(transformers, family.replace("ForCausalLM", "Config"))
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    yarn |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True}
    config = kind(**{**tiny_config(family), "rope_parameters": yarn})
    written = json.loads(config.to_json_string())
    before = architecture_of(written)
    passed_over = {key for key, changed in mutated(written) if not changes(before, changed)}
    harmless = {key for key in passed_over if key in _HARMLESS}
    # A window that is off, and the switch of one that is longer than the context.
    windows = {"sliding_window", "use_sliding_window"} if "use_sliding_window" in written else set()
    # Greedy choice knows no groups.
    groups = {"n_group", "topk_group"} if before.name == "DeepseekV2ForCausalLM" else set()
    assert passed_over - harmless - windows - groups == set()
    assert harmless <= {
        "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range",
        "is_decoder", "label2id", "max_window_layers", "model_type", "output_attentions", "output_hidden_states",
        "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
        "router_aux_loss_coef", "transformers_version", "use_cache", "_name_or_path",
    }  # fmt: skip


def changes(before: Architecture, config: dict[str, Any]) -> bool:
    try:
        return architecture_of(config) != before
    except ValueError:
        return True


DEEPSEEK_ABSENT = ("n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")


def test_a_key_is_absent_as_its_family_assumes() -> None:
    def without(family: str, *keys: str, **changes: Any) -> Architecture:
        config = tiny_config(family, **changes)
        return architecture_of({key: value for key, value in config.items() if key not in keys})

    assert without("LlamaForCausalLM", "num_key_value_heads").num_kv_heads == 4
    assert without("MistralForCausalLM", "num_key_value_heads", num_attention_heads=16).num_kv_heads == 8
    assert without("Qwen2ForCausalLM", "num_key_value_heads", num_attention_heads=64).num_kv_heads == 32
    assert without("LlamaForCausalLM", "head_dim").head_dim == 2
    assert without("Qwen3ForCausalLM", "head_dim").head_dim == 128
    assert without("LlamaForCausalLM", "rms_norm_eps").norm_eps == 1e-6
    assert without("MixtralForCausalLM", "rms_norm_eps").norm_eps == 1e-5
    assert without("DeepseekV3ForCausalLM", "q_lora_rank").latent.q_rank == 1536  # type: ignore[union-attr]
    assert tiny_architecture("DeepseekV3ForCausalLM", q_lora_rank=None).latent.q_rank is None  # type: ignore[union-attr]
    v3 = without("DeepseekV3ForCausalLM", *DEEPSEEK_ABSENT, n_routed_experts=16).experts
    assert v3 == Experts(16, 2, 8, (3,), 8, "sigmoid", True, 2.5, num_groups=8, top_groups=4, group_best=2, bias=True)
    v2 = without("DeepseekV2ForCausalLM", "first_k_dense_replace", "routed_scaling_factor", "topk_method").experts
    assert v2 == Experts(8, 2, 8, (0, 1, 2, 3), 16, normalize=False)
    moe = tiny_architecture("Qwen3MoeForCausalLM", norm_topk_prob=None)
    assert moe.experts is not None and not moe.experts.normalize
    with pytest.raises(ValueError, match=r"sliding_window = 4096 is shorter than max_position_embeddings \(8192\)"):
        without("MistralForCausalLM", "sliding_window", max_position_embeddings=8192)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_kv_heads_are_as_many_as_heads(family: str) -> None:
    assert tiny_architecture(family, num_key_value_heads=None, num_attention_heads=8).num_kv_heads == 8


def test_sparse_steps_and_dense_layers_decide_which_layers_have_experts() -> None:
    def layers(**changes: Any) -> tuple[int, ...]:
        experts = tiny_architecture("Qwen3MoeForCausalLM", num_hidden_layers=8, **changes).experts
        assert experts is not None
        return experts.layers

    assert layers(mlp_only_layers=None) == tuple(range(8))
    assert layers(mlp_only_layers=[0, 7]) == (1, 2, 3, 4, 5, 6)
    assert layers(decoder_sparse_step=2, mlp_only_layers=[]) == (1, 3, 5, 7)
    assert layers(decoder_sparse_step=3, mlp_only_layers=[2]) == (5,)


def test_greedy_choice_knows_no_groups() -> None:
    greedy = tiny_architecture("DeepseekV2ForCausalLM", n_group=None, topk_group=None).experts
    limited = tiny_architecture("DeepseekV2ForCausalLM", topk_method="group_limited_greedy").experts
    assert greedy is not None and limited is not None
    assert greedy == replace(limited, num_groups=1, top_groups=1)
    assert (limited.num_groups, limited.top_groups, limited.group_best) == (4, 2, 1)
