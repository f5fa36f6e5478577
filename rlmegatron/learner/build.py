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
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlmegatron.config.schema import ModelConfig
from rlmegatron.learner.attention import PackedAttention, RMSNorm
from rlmegatron.learner.groups import Topology
from rlmegatron.models.architecture import Architecture

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
    """The same body with a value head [H] -> 1 in place of the output layer; the head starts at zero."""

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
        return self.value_head(hidden).float().flatten()  # type: ignore[no-any-return]


def transformer_config(arch: Architecture, model: ModelConfig, topology: Topology) -> TransformerConfig:
    """Megatron's configuration of this architecture under this layout."""
    dtype = DTYPES[model.dtype]
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        sequence_parallel=topology.sequence_parallel,
        # Packed micro-batches differ in length. Megatron's interleaved schedule mixes up forward and backward shapes at
        # PP=2, so there micro-batches are filled to one length, and its unbatched sends keep the two directions apart.
        variable_seq_lengths=topology.vpp == 1,
        overlap_p2p_comm=topology.vpp > 1,
        batch_p2p_comm=topology.vpp == 1,
        moe_token_dispatcher_type="alltoall",  # the only dispatcher Megatron permits with variable lengths
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=model.dtype == "bf16",
        calculate_per_token_loss=True,  # losses are sums; the update divides once by the global count
        perform_initialization=False,  # every parameter comes from a checkpoint
        gradient_accumulation_fusion=False,
        persist_layer_norm=has_transformer_engine(),
        apply_rope_fusion=has_transformer_engine(),
        bias_activation_fusion=has_transformer_engine(),
        masked_softmax_fusion=False,
        **_recompute(model),
    )


def _recompute(model: ModelConfig) -> dict[str, Any]:
    if model.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if model.recompute == "selective" else {}


def has_transformer_engine() -> bool:
    """Whether Megatron found Transformer Engine (and so a CUDA device)."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE) and torch.cuda.is_available()


def layer_spec(arch: Architecture, model: ModelConfig) -> tuple[ModuleSpec, type | None]:
    """The spec of one layer, and the class of the block's final norm (None: Megatron's own)."""
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm), None
    spec = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(PackedAttention, params={"attention_chunk": model.attention_chunk})
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec, RMSNorm


def build_chunks(
    kind: type[HiddenStatesModel], arch: Architecture, model: ModelConfig, topology: Topology, device: torch.device
) -> list[HiddenStatesModel]:
    """This rank's pipeline chunks, on `device`, with unset parameters."""
    config = transformer_config(arch, model, topology)
    spec, final_norm = layer_spec(arch, model)
    return [
        _build_chunk(kind, arch, config, topology, spec, final_norm, chunk).to(device) for chunk in range(topology.vpp)
    ]


def _build_chunk(
    kind: type[HiddenStatesModel],
    arch: Architecture,
    config: TransformerConfig,
    topology: Topology,
    spec: ModuleSpec,
    final_norm: type | None,
    chunk: int,
) -> HiddenStatesModel:
    vp_stage = chunk if topology.vpp > 1 else None
    block: ModuleSpec | TransformerBlockSubmodules = spec
    if final_norm is not None:
        num_layers = get_num_layers_to_build(config, vp_stage, topology.pp_rank)
        block = TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=final_norm)
    return kind(
        config,
        block,
        vocab_size=arch.padded_vocab(topology.tp),
        max_sequence_length=arch.max_positions,
        pre_process=topology.pp_rank == 0 and chunk == 0,
        post_process=topology.is_last_stage and chunk == topology.vpp - 1,
        share_embeddings_and_output_weights=arch.tied_embeddings and kind is HiddenStatesModel,
        position_embedding_type="rope",
        rotary_base=arch.rope.base,
        rope_scaling=arch.rope.llama3_factor is not None,
        rope_scaling_factor=arch.rope.llama3_factor or 8.0,
        pg_collection=topology.collection,
        vp_stage=vp_stage,
    )
