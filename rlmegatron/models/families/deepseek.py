"""What DeepSeek-V2 and V3 share: latent attention, leading dense layers, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmegatron.models.architecture import LatentAttention
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, experts_per_token

# DeepSeek's own code gives the norms inside latent attention this epsilon, whatever rms_norm_eps says; Megatron and
# SGLang give them rms_norm_eps. All agree only here.
_LATENT_NORM_EPS = 1e-6


def deepseek_fields(keys: ConfigKeys, *, value_dim: int = 128) -> dict[str, Any]:
    """Everything but the experts."""
    keys.only("rms_norm_eps", _LATENT_NORM_EPS)
    fields = decoder_fields(keys, has_latent_attention=True)
    latent = LatentAttention(
        q_rank=_q_rank(keys),
        kv_rank=keys.positive("kv_lora_rank"),
        nope_dim=keys.positive("qk_nope_head_dim"),
        rope_dim=keys.positive("qk_rope_head_dim"),
        value_dim=keys.positive("v_head_dim", value_dim),
    )
    if latent.rope_dim % 2:
        raise ValueError(f"config.json: qk_rope_head_dim ({latent.rope_dim}) must be even: rotary positions turn pairs")
    for key, derived in (("head_dim", latent.rope_dim), ("qk_head_dim", latent.key_dim)):
        keys.only(key, derived)
    return {**fields, "latent": latent}


def _q_rank(keys: ConfigKeys) -> int | None:
    """null means that queries are not compressed; absence means what transformers assumes."""
    if "q_lora_rank" in keys and keys.optional("q_lora_rank") is None:
        return None
    return keys.positive("q_lora_rank", 1536)


def expert_fields(
    keys: ConfigKeys, num_layers: int, *, assumed: Mapping[str, Any], has_groups: bool = True
) -> dict[str, Any]:
    """Everything but the router's arithmetic.

    `assumed` is what holds where a key is absent, in DeepSeek's own config class and in transformers'; a key of which
    they assume different things must be there.
    """
    keys.only("moe_layer_freq", 1)
    ffn = keys.positive("moe_intermediate_size")
    dense, shared = (keys.count(key, assumed.get(key)) for key in ("first_k_dense_replace", "n_shared_experts"))
    if dense >= num_layers:
        raise ValueError(f"config.json: first_k_dense_replace must be from 0 to {num_layers - 1}, got {dense}")
    num = keys.positive("n_routed_experts")
    keys.only("num_local_experts", num)
    groups, top_groups = _groups(keys, num, assumed) if has_groups else (1, 1)
    return {
        "num": num,
        "top_k": experts_per_token(keys, num // groups * top_groups),
        "ffn": ffn,
        "layers": tuple(range(dense, num_layers)),
        "shared_ffn": ffn * shared,
        "scale": keys.positive_number("routed_scaling_factor", assumed.get("routed_scaling_factor")),
        "num_groups": groups,
        "top_groups": top_groups,
    }


def _groups(keys: ConfigKeys, num: int, assumed: Mapping[str, Any]) -> tuple[int, int]:
    groups, top_groups = (keys.positive(key, assumed.get(key)) for key in ("n_group", "topk_group"))
    if num % groups or top_groups > groups:
        raise ValueError(
            f"config.json: n_group ({groups}) must divide n_routed_experts ({num}) and be at least topk_group "
            f"({top_groups})"
        )
    return groups, top_groups
