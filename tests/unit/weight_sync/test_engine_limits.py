"""What SGLang would compute otherwise is refused before an engine starts.

The reasons were seen on a real engine: its log-probabilities, or its end, against transformers on the same weights.
"""

from __future__ import annotations

from typing import Any

import pytest
from random_checkpoint import NAMES, architecture

from rlmegatron.weight_sync.engine_limits import refuse_what_engines_cannot_serve

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_families_are_published_as_is_served(name: str, on_cpu: bool) -> None:
    refuse_what_engines_cannot_serve(architecture(name), on_cpu=on_cpu)


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
        ("DeepseekV3ForCausalLM", {"rope_scaling": None}, "on a CPU it needs rope scaling"),
    ],
)
def test_what_would_give_other_numbers_is_named(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        refuse_what_engines_cannot_serve(architecture(name, **changes), on_cpu=True)


def test_latent_attention_needs_no_scaling_on_a_gpu() -> None:
    refuse_what_engines_cannot_serve(architecture("DeepseekV3ForCausalLM", rope_scaling=None), on_cpu=False)
