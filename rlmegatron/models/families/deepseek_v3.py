"""DeepSeek-V3 and R1: sigmoid router with a bias for the choice alone, groups ranked by their two best experts.

A policy does not need the multi-token-prediction layers behind the decoder: they are dropped, and an exported
config.json says that there are none.
"""

from __future__ import annotations

from typing import Any

from rlmegatron.models.architecture import Architecture, Experts
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_rules import decoder_rules
from rlmegatron.models.families.deepseek import deepseek_fields, expert_fields

_ASSUMED = {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}


def read(keys: ConfigKeys) -> Architecture:
    """`scoring_func` and `topk_method`, which transformers no longer writes, may be absent."""
    fields: dict[str, Any] = deepseek_fields(keys)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("rope_interleave", True)
    experts = Experts(
        **expert_fields(keys, fields["num_layers"], assumed=_ASSUMED),
        scoring="sigmoid",
        normalize=keys.flag("norm_topk_prob", True),
        group_best=2,
        bias=True,
    )
    if experts.num_groups > 1 and experts.num // experts.num_groups < experts.group_best:
        raise ValueError(f"config.json: n_group ({experts.num_groups}) leaves less than 2 experts a group")
    return Architecture(
        **fields,
        experts=experts,
        rules=decoder_rules,
        engine_keys=(("moe_layer_freq", 1), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
        **_prediction_layers(keys, fields["num_layers"]),
    )


def _prediction_layers(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    count = keys.count("num_nextn_predict_layers", 0)
    if not count:
        return {}
    layers = "|".join(str(num_layers + number) for number in range(count))
    dropped = (
        rf"model\.layers\.({layers})\..+",
        f"{count} multi-token-prediction layer(s), which a policy does not use",
    )
    return {"dropped": (dropped,), "exported_keys": (("num_nextn_predict_layers", 0),)}
