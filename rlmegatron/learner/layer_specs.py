"""Which modules a layer is made of: Transformer Engine's where it is, else Megatron's local ones with our attention.

In: architecture and model section. Out: the block spec of one pipeline chunk. Must never read weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlmegatron.config.schema import ModelConfig
from rlmegatron.learner.attention import LatentAttention, PackedAttention, RMSNorm
from rlmegatron.learner.router import Router
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Stage


def has_transformer_engine() -> bool:
    """Whether Megatron found Transformer Engine (and so a CUDA device)."""
    return bool(transformer_engine.HAVE_TE) and torch.cuda.is_available()


def block_spec(arch: Architecture, model: ModelConfig, stage: Stage, *, with_te: bool) -> TransformerBlockSubmodules:
    """The layers of `stage`, dense or with experts each, and the final norm."""
    if with_te:
        layer_of, norm = engine_layer_spec, transformer_engine.TENorm
    else:
        layer_of, norm = partial(local_layer_spec, attention_chunk=model.attention_chunk), RMSNorm
    kinds = {is_moe: layer_of(arch, is_moe=is_moe) for is_moe in {arch.is_moe_layer(n) for n in stage.layers}}
    layers = [kinds[arch.is_moe_layer(number)] for number in stage.layers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def engine_layer_spec(arch: Architecture, *, is_moe: bool) -> ModuleSpec:
    """One layer of Transformer Engine's modules; norms are fused into the linear that follows where it allows."""
    spec = get_gpt_layer_with_transformer_engine_spec(**_kind(arch, is_moe=is_moe), moe_grouped_gemm=is_moe)
    return _completed(spec, arch, is_moe=is_moe)


def local_layer_spec(arch: Architecture, *, is_moe: bool, attention_chunk: int) -> ModuleSpec:
    """One layer of Megatron's own modules, with our attention and with norms that know of a cut sequence."""
    spec = get_gpt_layer_local_spec(**_kind(arch, is_moe=is_moe), normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(PackedAttention, params={"attention_chunk": attention_chunk})
    if arch.latent:
        # Cut over tensor parallelism, as the local spec has them, the gradient of the keys' rotary part is not summed.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        attention.q_layernorm, attention.kv_layernorm = RMSNorm if arch.latent.q_rank else IdentityOp, RMSNorm
    elif arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.submodules.sharded_state_dict_keys_map = _names_in_checkpoints(arch, is_moe=is_moe)
    return _completed(spec, arch, is_moe=is_moe)


def _names_in_checkpoints(arch: Architecture, *, is_moe: bool) -> dict[str, str]:
    """Where Transformer Engine fuses a norm into a linear: checkpoints of either kind of layer have its names."""
    into = {"self_attention.linear_qkv.": "input_layernorm."}
    if arch.latent:
        into = {f"self_attention.linear_{of}_up_proj.": f"self_attention.{of}_layernorm." for of in ("q", "kv")}
    if not is_moe:
        into["mlp.linear_fc1."] = "pre_mlp_layernorm."
    return {norm: f"{linear}layer_norm_" for linear, norm in into.items()}


def _kind(arch: Architecture, *, is_moe: bool) -> dict[str, Any]:
    return {
        "num_experts": arch.experts.num if arch.experts and is_moe else None,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,
        "multi_latent_attention": arch.latent is not None,
    }


def _completed(spec: ModuleSpec, arch: Architecture, *, is_moe: bool) -> ModuleSpec:
    """With our latent attention and our router, whatever the other modules are."""
    if arch.latent:
        spec.submodules.self_attention.module = LatentAttention
    if is_moe and arch.experts:
        mlp = spec.submodules.mlp
        # From 0.18 on, Megatron describes an MLP by a partial call in place of a spec.
        submodules: MoESubmodules = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        submodules.router = partial(Router, experts=arch.experts)
    return spec
