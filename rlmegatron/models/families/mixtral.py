"""Mixtral: Mistral with experts in every layer, named w1 (gate), w3 (up) and w2 (down)."""

from __future__ import annotations

from functools import partial

from rlmegatron.models.architecture import Architecture, Experts
from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.decoder_keys import decoder_fields, experts_per_token, refuse_windows
from rlmegatron.models.decoder_rules import ExpertNames, decoder_rules

_RULES = partial(decoder_rules, names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"))


def read(keys: ConfigKeys) -> Architecture:
    """Defaults of transformers' MixtralConfig: 8 KV heads, rotary base 1e6, norms' 1e-5, top 2 of 8 experts."""
    refuse_windows(keys)
    keys.only("router_jitter_noise", 0)
    fields = decoder_fields(keys, kv_heads=8, rope_base=1e6, norm_eps=1e-5)
    num = keys.positive("num_local_experts", 8)
    experts = Experts(
        num=num,
        top_k=experts_per_token(keys, num, default=2),
        ffn=fields["ffn_size"],
        layers=tuple(range(fields["num_layers"])),
    )
    return Architecture(**fields, experts=experts, rules=_RULES)
