"""Rotary positions are those of transformers to the last bit, and what is not understood is refused by name."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tiny_families import tiny_architecture, tiny_config
from torch import Tensor

from rlmegatron.models.rope import Rope
from rlmegatron.models.table import architecture_of

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama 3.1": {"rope_type": "llama3", **LLAMA3},
    "llama 3.2": {"rope_type": "llama3", **LLAMA3, "factor": 32.0},
    "llama3, other bands": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 16},
    "yarn": {**YARN, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn of deepseek-v3": {**YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn of deepseek-v2-lite": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, two mscales": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    "yarn, one mscale": {**YARN, "mscale": 1.3},
    "yarn, other mscale": {**YARN, "mscale_all_dim": 0.7},
    "yarn, other betas": {**YARN, "beta_fast": 16.5, "beta_slow": 2},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, one band": {**YARN, "beta_fast": 1, "beta_slow": 1, "truncate": False},
    "yarn, no stretch": {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, factor from lengths": {**YARN, "factor": None},
}


def of_transformers(rope: dict[str, Any], *, base: float, head_dim: int) -> tuple[Tensor, float]:
    """(inverse frequencies, attention factor)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=163840, rope_parameters={**rope, "rope_theta": base}
    )
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters
    return ROPE_INIT_FUNCTIONS.get(rope["rope_type"], plain)(config)


def read(rope: dict[str, Any] | None = None, **config: Any) -> Rope:
    """`rope` is `rope_parameters`."""
    config = {"max_position_embeddings": 163840, "rope_parameters": rope, **config}
    return tiny_architecture("LlamaForCausalLM", **config).rope


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("base", [10000, 500000.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_factor_are_those_of_transformers(kind: str, base: float, head_dim: int) -> None:
    expected, factor = of_transformers(copy.deepcopy(KINDS[kind]), base=base, head_dim=head_dim)
    found = read({**KINDS[kind], "rope_theta": base})
    assert torch.equal(found.inverse_frequencies(head_dim), expected)
    assert found.attention_factor == factor


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "yarn, factor from lengths"])
def test_the_softmax_scale_of_latent_attention_is_that_of_deepseek_v3(kind: str) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    rope = {**KINDS[kind], "rope_theta": 10000.0}
    config = {**tiny_config("DeepseekV3ForCausalLM", max_position_embeddings=163840), "rope_parameters": rope}
    module = DeepseekV3Attention(DeepseekV3Config(**copy.deepcopy({**config, "head_dim": 2})), layer_idx=0)
    assert architecture_of(config).softmax_scale == pytest.approx(module.scaling, rel=1e-15)


def test_yarn_scales_attention_by_the_square_of_its_factor() -> None:
    """0.1 ln 40 + 1 on cosine and sine each, of a head of 6."""
    arch = tiny_architecture("Qwen2ForCausalLM", rope_parameters={**YARN, "rope_theta": 1e4})
    assert arch.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(6), rel=1e-15)
    assert tiny_architecture("Qwen2ForCausalLM").softmax_scale == 1 / math.sqrt(6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rope_type", "type", "both"])
def test_both_spellings_are_one_rope(kind: str, name: str) -> None:
    values = {key: value for key, value in KINDS[kind].items() if key != "rope_type"}
    values |= {key: KINDS[kind]["rope_type"] for key in ("rope_type", "type") if name in (key, "both")}
    new = read({**KINDS[kind], "rope_theta": 12345.0})
    assert read(None, rope_theta=12345.0, rope_scaling=values) == new
    assert read({**values, "rope_theta": 12345.0}) == new
    assert read({**values, "rope_theta": 12345.0}, rope_theta=12345, rope_scaling=None) == new
    assert new.base == 12345.0 and new.kind == KINDS[kind]["rope_type"]


@pytest.mark.parametrize(
    ("family", "base"), [("LlamaForCausalLM", 1e4), ("MixtralForCausalLM", 1e6), ("DeepseekV3ForCausalLM", 1e4)]
)
@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_a_config_without_rope_theta_has_that_of_its_family(family: str, base: float, rope: dict[str, Any]) -> None:
    assert tiny_architecture(family, **rope).rope == Rope(base)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *[
            ({"rope_scaling": {key: kind, "factor": 2.0}}, f"rope type '{kind}' is not supported; supported: default")
            for kind in ("dynamic", "longrope", "su", "mrope", "proportional", "ntk")
            for key in ("type", "rope_type")
        ],
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "rope type 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_type is 'yarn' and type 'linear'; keep one"),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
            r"'default' has mrope_section = \[1, 2\]",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2, "finetuned": True}}, "'linear' has finetuned = True, which"),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 1}}, "'yarn' has extrapolation_factor = 1, which is not"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'default' has full_attention = "),
        ({"rope_scaling": {"factor": 4.0}}, "type 'default' has factor 4.0, which would do nothing"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling needs factor, a number above 0; it has None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope scaling needs factor, .* it has '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope scaling needs factor, .* it has 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "rope scaling needs factor, .* it has True"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "rope scaling needs factor, .* it has nan"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope scaling needs low_freq_factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "low_freq_factor 4.0 must be below"),
        ({"rope_scaling": {**YARN, "attention_factor": "1.0"}}, "needs attention_factor, .* it has '1.0'"),
        ({"rope_scaling": {**YARN, "mscale": -1}}, "needs mscale, .* it has -1"),
        ({"rope_scaling": {**YARN, "truncate": "false"}}, "truncate must be true or false, got 'false'"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}}, "must be a whole number, got 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; it must be 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor = 0 is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0, got 0"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number above 0, got '1e6'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0 and 1000000.0 in rope_par",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "needs rope_theta, .* it has -1"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_parameters = .* and rope_scaling = .* differ",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_parameters": []}, r"rope_parameters must be an object, got \[\]"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config\.json: .*{message}"):
        tiny_architecture("LlamaForCausalLM", **config)


def test_a_partial_factor_of_one_is_the_whole_head() -> None:
    assert read(None, partial_rotary_factor=1.0, rope_theta=1e4) == Rope(1e4)
    assert read({"rope_type": "default", "partial_rotary_factor": 1, "rope_theta": 1e4}) == Rope(1e4)
