"""The arithmetic of a layout: which rank holds what, which ranks form which engine, and about how many bytes it takes.

In: parallel sizes, section values and a `ModelCard`. Out: plain records. Must never import torch; nothing here looks at
a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlmegatron.config.model_card import ModelCard, layer_parameters
from rlmegatron.config.schema import ModelConfig, ParallelConfig, RunConfig

Axis = Literal["tp", "dp", "pp"]
NUM_BYTES = {"bf16": 2, "fp32": 4}
_GRADIENT_BYTES = 4
_MOMENT_BYTES = 8
_FP32_BYTES = 4
_VOCAB_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place on each parallel axis."""

    rank: int
    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of every axis; world = tensor x data x pipeline."""

    world: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    engine_tensor: int

    def __post_init__(self) -> None:
        assert self.world % (self.tensor * self.pipeline) == 0, f"no whole data parallelism in {self}"
        assert self.world % self.engine_tensor == 0, f"no whole engines in {self}"

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return self.world // self.engine_tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands in Megatron's default order tp-cp-ep-dp-pp: tp varies fastest, pp slowest."""
        assert 0 <= rank < self.world, f"rank {rank} is not in a world of {self.world}"
        rest, tp = divmod(rank, self.tensor)
        pp, dp = divmod(rest, self.data)
        return Coordinates(rank=rank, tp=tp, dp=dp, pp=pp)

    def groups(self, axis: Axis) -> list[list[int]]:
        """The ranks that communicate along `axis`: those that differ in no other coordinate."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coordinates(rank)
            other = {"tp": (at.dp, at.pp), "dp": (at.tp, at.pp), "pp": (at.tp, at.dp)}[axis]
            members.setdefault(other, []).append(rank)
        return list(members.values())

    def stage_ranks(self, stage: int) -> range:
        """The ranks of a pipeline stage, which are consecutive."""
        size = self.tensor * self.data
        return range(stage * size, (stage + 1) * size)

    def engine_ranks(self, engine: int) -> range:
        """The ranks of an engine, which are consecutive; the first one owns its server."""
        return range(engine * self.engine_tensor, (engine + 1) * self.engine_tensor)

    def stage_layers(self, stage: int, *, num_layers: int) -> list[range]:
        """The layers of a stage, one range per model chunk; with VPP chunk v of stage p is the (v * PP + p)-th cut."""
        size = num_layers // (self.pipeline * self.virtual_pipeline)
        starts = [(chunk * self.pipeline + stage) * size for chunk in range(self.virtual_pipeline)]
        return [range(start, start + size) for start in starts]


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


def layout_of(cfg: RunConfig, *, world_size: int) -> Layout:
    """The layout of a config whose rules hold."""
    sizes = cfg.parallel
    return Layout(
        world=world_size,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual_pipeline=sizes.virtual_pipeline,
        engine_tensor=cfg.rollout.tensor,
    )


def padded_vocab(vocab_size: int, *, tensor: int) -> int:
    """The vocabulary as the learner holds it: every tensor-parallel rank has a multiple of 8 rows."""
    multiple = _VOCAB_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


def rank_parameters(card: ModelCard, layout: Layout, stage: int, *, value_head: bool = False) -> int:
    """Parameters that a rank of `stage` holds; a tied output layer on another stage than the embedding is a copy."""
    layers = sum(len(chunk) for chunk in layout.stage_layers(stage, num_layers=card.num_layers))
    total = layers * layer_parameters(card, tensor=layout.tensor)
    vocabulary = padded_vocab(card.vocab_size, tensor=layout.tensor) // layout.tensor * card.hidden_size
    last = stage == layout.pipeline - 1
    if stage == 0:
        total += vocabulary
    if last:
        shares_embedding = card.tied_embeddings and layout.pipeline == 1
        output = card.hidden_size if value_head else 0 if shares_embedding else vocabulary
        total += card.hidden_size + output
    return total


def activation_bytes(
    card: ModelCard, layout: Layout, stage: int, *, model: ModelConfig, tokens: int, sequence: bool
) -> int:
    """Activations kept for the backward pass by a rank of `stage`, for micro-batches of `tokens` tokens.

    Per token and layer: both norms' inputs and outputs (4 hidden), q, k, v and the attention's output, and three values
    of the gated MLP's width; after Korthikanti et al. 2022 (arXiv 2205.05198, section 4) without dropout and with fused
    attention. Full recomputation keeps the input of each layer and one layer's values. Stage p of a 1F1B schedule holds
    PP - p micro-batches at a time; interleaving adds (PP - 1) / (PP * VPP) of that.
    """
    cut = layout.tensor if sequence else 1
    width = 2 * (card.num_heads + card.num_kv_heads) * card.head_dim + 3 * card.ffn_size
    per_layer = 4 * card.hidden_size // cut + width // layout.tensor
    layers = sum(len(chunk) for chunk in layout.stage_layers(stage, num_layers=card.num_layers))
    if model.recompute == "full":
        values = layers * (card.hidden_size // cut) + per_layer
    else:
        values = layers * per_layer
    in_flight = float(layout.pipeline - stage)
    if layout.virtual_pipeline > 1:
        in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline)
    return int(values * tokens * NUM_BYTES[model.dtype] * in_flight)


def memory_of(cfg: RunConfig, layout: Layout, card: ModelCard, stage: int, *, critic_card: ModelCard | None) -> Memory:
    """Estimated bytes of one rank of `stage`; `critic_card` is None for a critic that starts from the actor's model."""
    model, sizes = cfg.model, cfg.parallel
    parameters = rank_parameters(card, layout, stage)
    trained = _training_bytes(parameters, layout, model=model, sizes=sizes)
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


def _training_bytes(
    parameters: int, layout: Layout, *, model: ModelConfig, sizes: ParallelConfig
) -> tuple[int, int, int]:
    """Weights, fp32 gradients, and Adam's fp32 moments with (in bf16) fp32 main weights, cut over DP if asked."""
    state = _MOMENT_BYTES + (_FP32_BYTES if model.dtype == "bf16" else 0)
    shards = layout.data if sizes.distributed_optimizer else 1
    return parameters * NUM_BYTES[model.dtype], parameters * _GRADIENT_BYTES, -(-parameters * state // shards)


def _engine_weight_bytes(cfg: RunConfig, card: ModelCard) -> int:
    """One engine rank's weights; SGLang replicates KV heads where there are fewer than ranks, which is left out."""
    engine = Layout(
        world=cfg.rollout.tensor, tensor=cfg.rollout.tensor, pipeline=1, virtual_pipeline=1, engine_tensor=1
    )
    return rank_parameters(card, engine, 0) * NUM_BYTES[cfg.rollout.dtype or cfg.model.dtype]


def _kv_cache_bytes(cfg: RunConfig, card: ModelCard) -> int | None:
    """Keys and values of rollout.max_total_tokens tokens on one engine rank."""
    if cfg.rollout.max_total_tokens is None:
        return None
    heads = max(1, card.num_kv_heads // cfg.rollout.tensor)
    per_token = 2 * card.num_layers * heads * card.head_dim * NUM_BYTES[cfg.rollout.dtype or cfg.model.dtype]
    return cfg.rollout.max_total_tokens * per_token


def smallest_world(*, tensor: int, pipeline: int, engine_tensor: int) -> int:
    """The fewest ranks that hold whole models and whole engines (a least common multiple)."""
    model = tensor * pipeline
    return next(size for size in range(model, model * engine_tensor + 1, model) if size % engine_tensor == 0)


def spans(groups: Sequence[Sequence[int]]) -> str:
    """Groups of ranks as text; of many the first two and the last, as '0-1, 2-3, ..., 510-511'."""
    shown = [_span(group) for group in groups]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:2], "...", shown[-1]])


def _span(ranks: Sequence[int]) -> str:
    """Consecutive ranks as 'a-b', others as '{a, b, ...}'."""
    if len(ranks) == 1:
        return str(ranks[0])
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return "{" + ", ".join(shown if len(shown) <= 6 else [*shown[:2], "...", shown[-1]]) + "}"
