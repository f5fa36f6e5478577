"""Qwen3-MoE: Qwen3 with experts in every `decoder_sparse_step`-th layer; softmax router, no shared expert."""

from __future__ import annotations

from rlmegatron.models.architecture import Architecture, Experts
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, experts_per_token, refuse_windows
from rlmegatron.models.decoder_rules import decoder_rules


def read(keys: ConfigKeys) -> Architecture:
    """Defaults of transformers' Qwen3MoeConfig: 4 KV heads, top 8 of 128 experts, weights that are not normalised."""
    refuse_windows(keys, default=4096, has_switch=True)
    fields = decoder_fields(keys, kv_heads=4)
    step, dense = keys.positive("decoder_sparse_step", 1), _dense_layers(keys, fields["num_layers"])
    layers = tuple(layer for layer in range(fields["num_layers"]) if (layer + 1) % step == 0 and layer not in dense)
    num = keys.positive("num_experts", keys.optional("num_local_experts", 128))
    keys.only("num_local_experts", num)  # the name under which transformers 5 writes it
    experts = Experts(
        num=num,
        top_k=experts_per_token(keys, num, default=8),
        ffn=keys.positive("moe_intermediate_size", 768),
        layers=layers,
        normalize=keys.flag("norm_topk_prob"),
    )
    return Architecture(**fields, qk_norm=True, experts=experts, rules=decoder_rules)


def _dense_layers(keys: ConfigKeys, num_layers: int) -> list[int]:
    layers = keys.optional("mlp_only_layers", [])
    if not isinstance(layers, list) or any(layer not in range(num_layers) for layer in layers):
        raise ValueError(f"config.json: mlp_only_layers must be a list of layers below {num_layers}, got {layers!r}")
    return layers
