"""What SGLang would compute otherwise is refused before an engine starts.

The reasons were seen on a real engine: its log-probabilities, or its end, against transformers on the same weights.
"""

from __future__ import annotations

from typing import Any

import pytest
from random_checkpoint import NAMES, architecture

from rlmegatron.weight_sync.engine_config import keys_for_engines
from rlmegatron.weight_sync.engine_limits import refuse_what_engines_cannot_serve

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", NAMES)
def test_what_families_are_published_as_is_served(name: str) -> None:
    refuse_what_engines_cannot_serve(architecture(name))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "every layer experts"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "every layer experts"),
        ("MixtralForCausalLM", {"rope_scaling": YARN}, r"ignores rope scaling \(yarn\)"),
        ("MixtralForCausalLM", {"rope_theta": 12345.6}, r"rounds rope_theta \(12345.6\) down"),
        ("MixtralForCausalLM", {"head_dim": 6}, r"head_dim \(6\) must be hidden_size / num_attention_heads \(4\)"),
        ("DeepseekV2ForCausalLM", {"rope_scaling": LINEAR}, "takes rope scaling 'linear' for 'yarn'"),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "truncate": False}}, "ignores truncate"),
        (
            "Qwen3ForCausalLM",
            {"rope_scaling": {**YARN, "attention_factor": 1.5}},
            "ignores attention_factor = 1.5 of rope scaling",
        ),
        ("DeepseekV3ForCausalLM", {"rope_scaling": {**YARN, "mscale": 1.0}}, "where one of them is absent"),
    ],
)
def test_what_would_give_other_numbers_is_named(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        refuse_what_engines_cannot_serve(architecture(name, **changes))


def test_scaling_by_one_stands_in_for_none_on_a_cpu_alone() -> None:
    """SGLang builds latent attention there with YaRN alone; at factor 1 it changes no frequency and no scale."""
    arch = architecture("DeepseekV3ForCausalLM", rope_scaling=None)
    added = {"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": arch.max_positions}}
    config = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    assert keys_for_engines(config, arch, on_cpu=True) == added
    assert keys_for_engines(config, arch, on_cpu=False) == {}
    scaled = architecture("DeepseekV3ForCausalLM", **added)
    assert scaled.rope.inverse_frequencies(8).equal(arch.rope.inverse_frequencies(8))
    assert (scaled.softmax_scale, scaled.rope.attention_factor) == (arch.softmax_scale, arch.rope.attention_factor)


def test_keys_that_transformers_leaves_out_are_given_to_engines() -> None:
    arch = architecture("DeepseekV3ForCausalLM", rope_scaling=YARN)
    added = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    assert keys_for_engines({}, arch, on_cpu=True) == added
    assert keys_for_engines({"scoring_func": "sigmoid"}, arch, on_cpu=True).keys() == {"moe_layer_freq", "topk_method"}


def test_what_sglang_would_read_otherwise_is_said_in_its_words() -> None:
    """It takes linear scaling's factor as a float alone, and limits greedy routing by groups that greedy ignores."""
    linear = {"rope_scaling": {"type": "linear", "factor": 2}}
    arch = architecture("LlamaForCausalLM", **linear)
    found = keys_for_engines(linear, arch, on_cpu=False)["rope_scaling"]
    assert found == {"type": "linear", "factor": 2.0} and isinstance(found["factor"], float)
    greedy = {"topk_method": "greedy", "n_group": 3, "topk_group": 1, "moe_layer_freq": 1, "scoring_func": "softmax"}
    arch = architecture("DeepseekV2ForCausalLM", **greedy)
    assert keys_for_engines(greedy, arch, on_cpu=False) == {"n_group": 1, "topk_group": 1}
    limited = {**greedy, "topk_method": "group_limited_greedy", "topk_group": 3}
    assert keys_for_engines(limited, architecture("DeepseekV2ForCausalLM", **limited), on_cpu=False) == {}
