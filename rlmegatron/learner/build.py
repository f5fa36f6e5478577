"""Megatron-Core models from an `Architecture`: the pipeline chunks of this rank, on Transformer Engine where it is.

In: architecture, topology and the model section. Out: `nn.Module` chunks that return hidden states, never logits. Must
never read files; `models/load.py` fills the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from rlmegatron.config.schema import ModelConfig
from rlmegatron.learner.fp32_product import Fp32Linear
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.layer_specs import block_spec, has_transformer_engine
from rlmegatron.learner.rotary import set_rotary
from rlmegatron.learner.router import listen
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.rules import Stage

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class HiddenStatesModel(GPTModel):
    """A GPT model whose last stage returns the final hidden states [T 1 H], whole on every tensor-parallel rank.

    The output layer holds its weight; `vocab_parallel.token_logprobs` applies it chunk by chunk.
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of the output layer [padded vocabulary / TP, H], on the last stage."""
        shared = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shared else self.output_layer.weight  # type: ignore[no-any-return]


class ValueModel(HiddenStatesModel):
    """The same body with a value head [H] -> 1 in place of the output layer; it is 0 until a checkpoint fills it."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            nn.init.zeros_(self.value_head.weight)
            self.value_head.to(next(self.decoder.parameters()).device)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron's, without what a language model adds for its output layer."""
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)

    def value(self, hidden: Tensor, topology: Topology) -> Tensor:
        """Hidden states of the last stage -> values [T] fp32; every tensor-parallel rank computes the same."""
        if topology.sequence_parallel:
            # Every rank then computes the same loss, so the backward pass only has to split, not to reduce.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=topology.tp_group
            )
        return Fp32Linear.apply(hidden.flatten(0, -2), self.value_head.weight).flatten()  # type: ignore[no-any-return]


def transformer_config(arch: Architecture, model: ModelConfig, topology: Topology) -> TransformerConfig:
    """Megatron's configuration of this architecture under this layout."""
    dtype, with_te = DTYPES[model.dtype], has_transformer_engine()
    kind = MLATransformerConfig if arch.latent else TransformerConfig
    return kind(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm or arch.latent is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bf16",
        calculate_per_token_loss=True,  # losses are sums; the update divides once by the global count
        perform_initialization=False,  # every parameter comes from a checkpoint
        gradient_accumulation_fusion=False,
        persist_layer_norm=with_te,
        apply_rope_fusion=with_te and arch.latent is None,
        bias_activation_fusion=with_te,
        masked_softmax_fusion=False,
        **_parallel_fields(topology),
        **(_latent_fields(arch) if arch.latent else _attention_fields(arch)),
        **(_expert_fields(arch, with_te=with_te) if arch.experts else {}),
        **_recompute(model),
    )


def _parallel_fields(topology: Topology) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": topology.first_stage_layers,
        "num_layers_in_last_pipeline_stage": topology.last_stage_layers,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        "sequence_parallel": topology.sequence_parallel,
        # Packed micro-batches differ in length. Megatron's interleaved schedule mixes up forward and backward shapes at
        # PP=2, so there micro-batches are filled to one length, and its unbatched sends keep the two directions apart.
        "variable_seq_lengths": topology.vpp == 1,
        "overlap_p2p_comm": topology.vpp > 1,
        "batch_p2p_comm": topology.vpp == 1,
        "moe_token_dispatcher_type": "alltoall",  # the only dispatcher Megatron permits with variable lengths
    }


def _attention_fields(arch: Architecture) -> dict[str, Any]:
    scale = arch.softmax_scale if arch.rope.attention_factor != 1.0 else None
    return {"num_query_groups": arch.num_kv_heads, "kv_channels": arch.head_dim, "softmax_scale": scale}


def _latent_fields(arch: Architecture) -> dict[str, Any]:
    """`set_rotary` replaces the rotary embedding, and the softmax scale is the factor's square over the key's width."""
    latent = arch.latent
    assert latent is not None
    return {
        "num_query_groups": arch.num_heads,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "yarn",
        "rotary_base": arch.rope.base,
        "rotary_scaling_factor": arch.rope.factor,
        "mscale_all_dim": arch.rope.mscale_all_dim,
    }


def _expert_fields(arch: Architecture, *, with_te: bool) -> dict[str, Any]:
    experts = arch.experts
    assert experts is not None
    return {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_layer_freq": [int(arch.is_moe_layer(layer)) for layer in range(arch.num_layers)],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": with_te,
    }


def _recompute(model: ModelConfig) -> dict[str, Any]:
    if model.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if model.recompute == "selective" else {}


def build_chunks(
    kind: type[HiddenStatesModel], arch: Architecture, model: ModelConfig, topology: Topology
) -> list[HiddenStatesModel]:
    """This rank's pipeline chunks with unset parameters."""
    config = transformer_config(arch, model, topology)
    cut = topology.stages(arch.num_layers)
    return [
        _build_chunk(kind, arch, config, model, topology, cut[topology.pp_rank, chunk], chunk)
        for chunk in range(topology.vpp)
    ]


def _build_chunk(
    kind: type[HiddenStatesModel],
    arch: Architecture,
    config: TransformerConfig,
    model: ModelConfig,
    topology: Topology,
    stage: Stage,
    chunk: int,
) -> HiddenStatesModel:
    built = kind(
        config,
        block_spec(arch, model, stage, with_te=has_transformer_engine()),
        vocab_size=arch.padded_vocab(topology.tp),
        max_sequence_length=arch.max_positions,
        pre_process=stage.is_first,
        post_process=stage.is_last,
        share_embeddings_and_output_weights=arch.tied_embeddings and kind is HiddenStatesModel,
        position_embedding_type="rope",
        rotary_base=arch.rope.base,
        pg_collection=topology.collection,
        vp_stage=chunk if topology.vpp > 1 else None,
    )
    set_rotary(built, arch, topology.collection.cp)
    for number, layer in zip(stage.layers, built.decoder.layers, strict=True):
        if arch.experts and arch.is_moe_layer(number):
            listen(layer, number=arch.experts.layers.index(number))
    return built
