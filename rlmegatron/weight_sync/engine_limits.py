"""What a config.json may say, and SGLang would compute otherwise or not at all.

In: an architecture. Out: nothing, or a ValueError before anything starts: without it
such a model would fail at its first publish, or generate with other numbers than the learner's. Pure; must never import
torch or sglang. The facts are those of sglang 0.5.21, each with its file.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rope import inferred_attention_factor


def refuse_what_engines_cannot_serve(arch: Architecture) -> None:
    """ValueError names every reason; converting and exporting such a model works all the same."""
    reasons = [*_of_yarn(arch), *_of_experts(arch), *_of_mixtral(arch), *_of_latent_attention(arch)]
    if reasons:
        raise ValueError(f"config.json: SGLang cannot serve this {arch.name}: {'; '.join(reasons)}")


def _of_yarn(arch: Architecture) -> Iterator[str]:
    # rotary_embedding/yarn.py: the factor always follows from the others.
    rope = arch.rope
    if rope.kind != "yarn":
        return
    if rope.attention_factor != inferred_attention_factor(rope.factor, rope.mscale, rope.mscale_all_dim):
        yield f"it ignores attention_factor = {rope.attention_factor} of rope scaling"
    if arch.latent and bool(rope.mscale) != bool(rope.mscale_all_dim):
        yield "it reads mscale and mscale_all_dim otherwise where one of them is absent"


def _of_experts(arch: Architecture) -> Iterator[str]:
    # qwen3_moe.py, Qwen3MoeDecoderLayer: is_layer_sparse = True.
    if arch.name == "Qwen3MoeForCausalLM" and arch.experts and len(arch.experts.layers) < arch.num_layers:
        yield "it gives every layer experts, whatever mlp_only_layers and decoder_sparse_step say"


def _of_mixtral(arch: Architecture) -> Iterator[str]:
    # mixtral.py, MixtralAttention: get_rope without scaling, base=int(rope_theta), head_dim = hidden_size // num_heads.
    if arch.name != "MixtralForCausalLM":
        return
    if arch.rope.kind != "default":
        yield f"it ignores rope scaling ({arch.rope.kind})"
    if arch.rope.base != int(arch.rope.base):
        yield f"it rounds rope_theta ({arch.rope.base}) down"
    if arch.head_dim * arch.num_heads != arch.hidden_size:
        size = arch.hidden_size / arch.num_heads
        yield f"head_dim ({arch.head_dim}) must be hidden_size / num_attention_heads ({size:g})"


def _of_latent_attention(arch: Architecture) -> Iterator[str]:
    # deepseek_v2.py, DeepseekV2AttentionMLA: any scaling becomes "deepseek_yarn"; rotary_embedding/factory.py.
    if not arch.latent:
        return
    if arch.rope.kind not in ("default", "yarn"):
        yield f"it takes rope scaling {arch.rope.kind!r} for 'yarn'"
    if not arch.rope.truncate:
        yield "it ignores truncate = false of rope scaling"
