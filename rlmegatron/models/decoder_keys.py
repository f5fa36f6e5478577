"""The config.json keys that all decoders share, read into the fields of an `Architecture`.

In: `ConfigKeys` and what the family assumes where a key is absent. Out: keyword arguments. Pure; must never import
torch or megatron.
"""

from __future__ import annotations

from typing import Any

from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.rope import read_rope

# What no family here is built for: any other value would change the numbers.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}


def decoder_fields(
    keys: ConfigKeys,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_base: float = 10000.0,
    norm_eps: float = 1e-6,
    has_latent_attention: bool = False,
) -> dict[str, Any]:
    """What follows `keys` is what transformers' config class of the family assumes where a key is absent.

    With latent attention the head sizes are the family's business, and only as many KV heads as heads are allowed.
    """
    for key, allowed in _NOT_BUILT.items():
        keys.only(key, *allowed)
    names = keys.optional("architectures")
    heads, hidden = keys.positive("num_attention_heads"), keys.positive("hidden_size")
    groups = _kv_heads(keys, heads, heads if has_latent_attention else kv_heads or heads)
    if has_latent_attention and groups != heads:
        raise ValueError(f"config.json: num_key_value_heads ({groups}) must be num_attention_heads ({heads})")
    return {
        "name": names[0],
        "num_layers": keys.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_size": keys.positive("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": 0 if has_latent_attention else _head_dim(keys, hidden, heads, head_dim),
        "vocab_size": keys.positive("vocab_size"),
        "max_positions": keys.positive("max_position_embeddings"),
        "norm_eps": keys.positive_number("rms_norm_eps", norm_eps),
        "rope": read_rope(keys, default_base=rope_base),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }


def _kv_heads(keys: ConfigKeys, heads: int, default: int) -> int:
    """null means as many as heads, absence what the family assumes."""
    groups = keys.positive("num_key_value_heads", heads if "num_key_value_heads" in keys else default)
    if heads % groups:
        raise ValueError(f"config.json: num_key_value_heads ({groups}) must divide num_attention_heads ({heads})")
    return groups


def _head_dim(keys: ConfigKeys, hidden: int, heads: int, default: int | None) -> int:
    if keys.optional("head_dim", default) is None and hidden % heads:
        raise ValueError(
            f"config.json: no head_dim, and hidden_size ({hidden}) / num_attention_heads ({heads}) is not whole"
        )
    size = keys.positive("head_dim", default or hidden // heads)
    if size % 2:
        raise ValueError(f"config.json: head_dim ({size}) must be even: rotary positions turn pairs")
    return size


def experts_per_token(keys: ConfigKeys, available: int, default: int | None = None) -> int:
    """How many experts a token goes to, of the `available` ones that it may choose from."""
    top_k = keys.positive("num_experts_per_tok", default)
    if top_k > available:
        raise ValueError(f"config.json: num_experts_per_tok ({top_k}) exceeds the {available} experts to choose from")
    return top_k


def refuse_windows(keys: ConfigKeys, *, default: int | None = None, has_switch: bool = False) -> None:
    """Attention within a window that is shorter than the context is not built.

    `default` is the window where the key is absent; null means none. `has_switch` families (Qwen) attend within the
    window only if `use_sliding_window` is true.
    """
    is_on = keys.flag("use_sliding_window") if has_switch else True
    window, positions = _window(keys, default), keys.positive("max_position_embeddings")
    if is_on and window is not None and window < positions:
        raise ValueError(
            f"config.json: sliding_window = {window} is shorter than max_position_embeddings ({positions}), and "
            "attention within a window is not supported; set sliding_window to null to attend to whole contexts, or "
            f"max_position_embeddings to {window} to stay within one window"
        )
    kinds = keys.optional("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"config.json: layer_types = {kinds!r} is not supported; each must be 'full_attention'"[:300])


def _window(keys: ConfigKeys, default: int | None) -> int | None:
    if "sliding_window" not in keys:
        return default
    return None if keys.optional("sliding_window") is None else keys.positive("sliding_window")
