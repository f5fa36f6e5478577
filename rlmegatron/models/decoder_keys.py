"""The config.json keys that all decoders share, read into the fields of an `Architecture`.

In: `ConfigKeys` and what the family assumes where a key is absent. Out: keyword arguments. Pure; must never import
torch or megatron.
"""

from __future__ import annotations

from typing import Any

from rlmegatron.models.config_keys import ConfigKeys
from rlmegatron.models.rope import read_rope


def decoder_fields(
    keys: ConfigKeys,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_base: float = 10000.0,
    has_latent_attention: bool = False,
) -> dict[str, Any]:
    """`kv_heads`, `head_dim`, `rope_base`: what transformers' config class of the family assumes if they are absent.

    With latent attention the head sizes are the family's business, and only as many KV heads as heads are allowed.
    """
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("attention_dropout", 0, 0.0)
    keys.only("use_mrope", False)
    keys.only("rope_interleaved", False)
    names = keys.optional("architectures")
    heads, hidden = keys.positive("num_attention_heads"), keys.positive("hidden_size")
    groups = keys.positive("num_key_value_heads", heads if has_latent_attention else kv_heads or heads)
    if heads % groups or (has_latent_attention and groups != heads):
        allowed = "be num_attention_heads" if has_latent_attention else "divide num_attention_heads"
        raise ValueError(f"config.json: num_key_value_heads ({groups}) must {allowed} ({heads})")
    own = head_dim or (None if hidden % heads else hidden // heads)
    if own is None and not has_latent_attention and keys.optional("head_dim") is None:
        raise ValueError(
            f"config.json: no head_dim, and hidden_size ({hidden}) / num_attention_heads ({heads}) is not whole"
        )
    return {
        "name": names[0],
        "num_layers": keys.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_size": keys.positive("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": 0 if has_latent_attention else keys.positive("head_dim", own),
        "vocab_size": keys.positive("vocab_size"),
        "max_positions": keys.positive("max_position_embeddings"),
        "norm_eps": keys.positive_number("rms_norm_eps", 1e-6),
        "rope": read_rope(keys, default_base=rope_base),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }


def refuse_windows(keys: ConfigKeys, *, on_by_default: bool = True) -> None:
    """Attention within a window that is shorter than the context is not built.

    `use_sliding_window` (Qwen, off by default) turns `sliding_window` on; where the key is unknown (Mistral) the window
    alone decides.
    """
    is_on = keys.optional("use_sliding_window", on_by_default)
    window, positions = keys.optional("sliding_window"), keys.positive("max_position_embeddings")
    if is_on and window is not None and window < positions:
        raise ValueError(
            f"config.json: sliding_window = {window} is shorter than max_position_embeddings ({positions}), and "
            "attention within a window is not supported; set sliding_window to null to attend to whole contexts, or "
            f"max_position_embeddings to {window} to stay within one window"
        )
    if any(kind != "full_attention" for kind in keys.optional("layer_types", ())):
        raise ValueError("config.json: layer_types other than 'full_attention' are not supported")
