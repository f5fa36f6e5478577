"""DeepSeek-V2 and V2-Lite: softmax router, groups of experts ranked by their best one, weights not normalised.

The softmax scale carries the square of YaRN's mscale_all_dim factor, as in DeepSeek's own code and in SGLang;
transformers 5.12 leaves it out of this family alone.
"""

from __future__ import annotations

from typing import Any

from rlmegatron.models.architecture import Architecture, Experts
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_rules import decoder_rules
from rlmegatron.models.families.deepseek import deepseek_fields, expert_fields

_METHODS = ("greedy", "group_limited_greedy")
_ASSUMED = {"first_k_dense_replace": 0, "routed_scaling_factor": 1.0}


def read(keys: ConfigKeys) -> Architecture:
    """`topk_method` decides whether groups count; `norm_topk_prob` true is refused: implementations differ on it."""
    fields: dict[str, Any] = deepseek_fields(keys)
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    method = keys.optional("topk_method", "greedy")
    if method not in _METHODS:
        raise ValueError(f"config.json: topk_method = {method!r} is not supported; supported: {', '.join(_METHODS)}")
    if method == "greedy":
        keys.ignore("n_group", "topk_group")
    experts = expert_fields(keys, fields["num_layers"], assumed=_ASSUMED, has_groups=method != "greedy")
    return Architecture(
        **fields,
        experts=Experts(**experts, normalize=False, group_best=1),
        rules=decoder_rules,
        engine_keys=(("moe_layer_freq", 1), ("scoring_func", "softmax")),
    )
