"""About how many bytes a rank takes: what it holds of a model, its optimizer, activations, and an engine beside them.

In: a `Layout`, section values and a `ModelCard`. Out: plain records. Must never import torch; nothing here looks at a
device.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmegatron.config.layout import Layout
from rlmegatron.config.model_card import Count, ModelCard
from rlmegatron.config.partition import padded_vocab
from rlmegatron.config.schema import ModelConfig, ParallelConfig, RunConfig

NUM_BYTES = {"bf16": 2, "fp32": 4}
_GRADIENT_BYTES = 4
_MOMENT_BYTES = 8
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters that one rank holds; those of experts are replicated over other ranks than the rest."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated bytes of one rank while it trains; `engine` and `kv_cache` are what it holds while it generates."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    critic: int
    activations: int
    logits: int
    engine: int
    kv_cache: int | None
    """None where the engine sizes it from rollout.mem_fraction."""

    @property
    def training(self) -> int:
        """Everything of the learner at once."""
        models = self.weights + self.gradients + self.optimizer + self.reference + self.critic
        return models + self.activations + self.logits


def rank_parameters(card: ModelCard, layout: Layout, stage: int, *, value_head: bool = False) -> Held:
    """What a rank of `stage` holds; a tied output layer on another stage than the embedding is a copy."""
    parts = [card.layers[layer] for chunk in layout.stage_layers(stage, num_layers=card.num_layers) for layer in chunk]
    if stage == 0:
        parts.append(card.first)
    if stage == layout.pipeline - 1:
        # A value head is one row, whole on every rank, in place of the output layer.
        parts.append(Count(whole=card.last.whole + card.hidden_size) if value_head else card.last)
        if stage > 0 and not value_head:
            parts.append(card.copies)
    rows = padded_vocab(card.vocab_size, tensor=layout.tensor) // layout.tensor
    return Held(
        dense=sum(part.dense_on_rank(tensor=layout.tensor, vocab_rows=rows) for part in parts),
        expert=sum(part.expert_on_rank(expert=layout.expert, expert_tensor=layout.expert_tensor) for part in parts),
    )


def activation_bytes(
    card: ModelCard, layout: Layout, stage: int, *, model: ModelConfig, tokens: int, sequence: bool
) -> int:
    """Activations kept for the backward pass by a rank of `stage`, for micro-batches of `tokens` tokens.

    After Korthikanti et al. 2022 (arXiv 2205.05198, section 4) without dropout and with fused attention. Full
    recomputation keeps the input of each layer and one layer's values. Stage p of a 1F1B schedule holds PP - p
    micro-batches at a time; interleaving adds (PP - 1) / (PP * VPP) of that.
    """
    cut = layout.tensor if sequence else 1
    chunks = layout.stage_layers(stage, num_layers=card.num_layers)
    per_layer = [_layer_values(card, layout, layer, cut=cut) for chunk in chunks for layer in chunk]
    values = sum(per_layer)
    if model.recompute == "full":
        values = len(per_layer) * (card.hidden_size // cut) + max(per_layer)
    in_flight = float(layout.pipeline - stage)
    if layout.virtual_pipeline > 1:
        in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline)
    return int(values * tokens * NUM_BYTES[model.dtype] * in_flight)


def _layer_values(card: ModelCard, layout: Layout, layer: int, *, cut: int) -> int:
    """Values per token that a rank keeps of one layer; `cut` is how often the sequence is cut.

    Both norms' inputs and outputs (4 hidden), attention's values, and three values of the gated MLP's width. Of experts
    a token keeps, for each one it visits, that one's input and three values of its width, if all experts have as many
    tokens; the ranks that share an expert have each other's tokens too.
    """
    whole, shared = 4 * card.hidden_size + card.latent_values, card.attention_values
    experts = card.experts
    if experts is None or not card.is_moe_layer(layer):
        shared += 3 * card.ffn_size
    else:
        whole += experts.num
        shared += 3 * experts.shared_ffn
        shared += experts.top_k * (layout.expert_tensor * card.hidden_size + 3 * experts.ffn)
    return whole // cut + shared // layout.tensor


def memory_of(cfg: RunConfig, layout: Layout, card: ModelCard, stage: int, *, critic_card: ModelCard | None) -> Memory:
    """Estimated bytes of one rank of `stage`; `critic_card` is None for a critic that starts from the actor's model."""
    model, sizes = cfg.model, cfg.parallel
    trained = _training_bytes(rank_parameters(card, layout, stage), layout, model=model, sizes=sizes)
    activations = activation_bytes(
        card, layout, stage, model=model, tokens=cfg.train.micro_batch_tokens, sequence=sizes.sequence
    )
    critic = 0
    if cfg.trains_critic:
        critic = sum(
            _training_bytes(
                rank_parameters(critic_card or card, layout, stage, value_head=True), layout, model=model, sizes=sizes
            )
        )
    vocabulary = padded_vocab(card.vocab_size, tensor=sizes.tensor) // sizes.tensor
    return Memory(
        weights=trained[0],
        gradients=trained[1],
        optimizer=trained[2],
        reference=trained[0] if cfg.needs_reference else 0,
        critic=critic,
        activations=activations,
        logits=2 * cfg.model.logprob_chunk * vocabulary * _FP32_BYTES if stage == layout.pipeline - 1 else 0,
        engine=_engine_weight_bytes(cfg, card),
        kv_cache=_kv_cache_bytes(cfg, card),
    )


def _training_bytes(held: Held, layout: Layout, *, model: ModelConfig, sizes: ParallelConfig) -> tuple[int, int, int]:
    """Weights, fp32 gradients, and Adam's fp32 moments with (in bf16) fp32 main weights.

    The optimizer's part is cut, if asked, over the ranks that hold the same parameters.
    """
    state = _MOMENT_BYTES + (_FP32_BYTES if model.dtype == "bf16" else 0)
    shards = (layout.data, layout.expert_data) if sizes.distributed_optimizer else (1, 1)
    optimizer = -(-held.dense * state // shards[0]) + -(-held.expert * state // shards[1])
    return held.total * NUM_BYTES[model.dtype], held.total * _GRADIENT_BYTES, optimizer


def _engine_weight_bytes(cfg: RunConfig, card: ModelCard) -> int:
    """One engine rank's weights; SGLang replicates KV heads where there are fewer than ranks, which is left out."""
    ranks = cfg.rollout.tensor
    engine = Layout(world=ranks, tensor=ranks, pipeline=1, virtual_pipeline=1, engine_tensor=ranks, expert_tensor=ranks)
    return rank_parameters(card, engine, 0).total * NUM_BYTES[cfg.engine_dtype]


def _kv_cache_bytes(cfg: RunConfig, card: ModelCard) -> int | None:
    """What one engine rank caches of rollout.max_total_tokens tokens; a latent is whole on every rank."""
    if cfg.rollout.max_total_tokens is None:
        return None
    shares = 1 if card.num_kv_heads is None else min(card.num_kv_heads, cfg.rollout.tensor)
    per_token = card.num_layers * card.cached_values // shares * NUM_BYTES[cfg.engine_dtype]
    return cfg.rollout.max_total_tokens * per_token
