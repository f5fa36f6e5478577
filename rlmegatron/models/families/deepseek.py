"""What DeepSeek-V2 and V3 share: latent attention, leading dense layers, shared experts."""

from __future__ import annotations

from typing import Any

from rlmegatron.models.architecture import LatentAttention
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields

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
    for key, derived in (("head_dim", latent.rope_dim), ("qk_head_dim", latent.key_dim)):
        keys.only(key, derived)
    return {**fields, "latent": latent}


def _q_rank(keys: ConfigKeys) -> int | None:
    """null means that queries are not compressed; absence means what transformers assumes."""
    if "q_lora_rank" in keys and keys.optional("q_lora_rank") is None:
        return None
    return keys.positive("q_lora_rank", 1536)


def expert_fields(keys: ConfigKeys, num_layers: int) -> dict[str, Any]:
    """Everything but the router's arithmetic."""
    keys.only("moe_layer_freq", 1)
    ffn = keys.positive("moe_intermediate_size")
    dense = keys.optional("first_k_dense_replace", 0)
    if not isinstance(dense, int) or not 0 <= dense < num_layers:
        raise ValueError(f"config.json: first_k_dense_replace must be from 0 to {num_layers - 1}, got {dense!r}")
    num = keys.positive("n_routed_experts")
    keys.only("num_local_experts", num)
    groups, top_groups = keys.positive("n_group", 1), keys.positive("topk_group", 1)
    if num % groups or top_groups > groups:
        raise ValueError(
            f"config.json: n_group ({groups}) must divide n_routed_experts ({num}) and be at least topk_group "
            f"({top_groups})"
        )
    return {
        "num": num,
        "top_k": keys.positive("num_experts_per_tok"),
        "ffn": ffn,
        "layers": tuple(range(dense, num_layers)),
        "shared_ffn": ffn * (keys.optional("n_shared_experts") or 0),
        "scale": keys.positive_number("routed_scaling_factor", 1.0),
        "num_groups": groups,
        "top_groups": top_groups,
    }
