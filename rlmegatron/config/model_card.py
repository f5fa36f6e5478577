"""The numbers of one model that its layout and its memory depend on, whatever its family.

In: nothing; `rlmegatron/models/card.py` fills a card from a model directory. Out: `ModelCard`. Pure; must never import
torch or transformers, nor know a family by its name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """Parameters of one part of a model (a layer, or what a stage holds besides layers), by what cuts them."""

    cut: int = 0
    """Cut over tensor-parallel ranks."""
    whole: int = 0
    """Whole on every rank."""
    expert_cut: int = 0
    """Of all experts: spread over expert-parallel ranks, each expert cut over the experts' tensor-parallel ranks."""
    expert_whole: int = 0
    """Of all experts: spread over expert-parallel ranks, but not cut."""
    per_token: int = 0
    """For each row of the vocabulary, which is padded and cut over tensor-parallel ranks."""

    def total(self, vocab_size: int) -> int:
        """All of them, in a model that is not cut."""
        return self.cut + self.whole + self.of_experts + self.per_token * vocab_size

    @property
    def of_experts(self) -> int:
        """Those of all experts together."""
        return self.expert_cut + self.expert_whole

    def dense_on_rank(self, *, tensor: int, vocab_rows: int) -> int:
        """What one rank holds besides experts; `vocab_rows` are its rows of the padded vocabulary."""
        return self.cut // tensor + self.whole + self.per_token * vocab_rows

    def expert_on_rank(self, *, expert: int, expert_tensor: int) -> int:
        """What one rank holds of the experts."""
        return (self.expert_cut // expert_tensor + self.expert_whole) // expert


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A mixture of experts, of which each token visits `top_k`."""

    num: int
    top_k: int
    ffn: int
    """Width of one expert."""
    shared_ffn: int
    """Width of what every token passes through besides; 0 if there is none."""
    layers: tuple[int, ...]
    """The layers that have experts; the others have a dense MLP."""
    has_bias: bool
    """Whether the router has a bias that only moves its choice (DeepSeek-V3)."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One decoder."""

    path: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Width of the MLP in layers without experts."""
    num_heads: int
    num_kv_heads: int | None
    """None for latent attention, where every head has a key and a value of its own."""
    head_dim: int
    """Width of a query or key head."""
    vocab_size: int
    tied_embeddings: bool
    max_positions: int
    """Longest context the positions cover, RoPE scaling included."""
    has_chat_template: bool | None
    """None where there is no tokenizer to have one, as a plan of the layout needs none."""
    attention_values: int
    """Queries, keys, values and outcome of all heads of one layer: values per token, cut over tensor parallelism."""
    latent_values: int
    """Compressed queries, keys and values of one layer: values per token that tensor parallelism does not cut."""
    cached_values: int
    """What an engine's KV cache holds of one layer: values per token, of all KV heads or of the latent."""
    experts: ExpertSizes | None
    left_out: tuple[str, ...]
    """What the checkpoint may hold besides, which the model does without."""
    first: Count
    """What the first stage holds besides layers."""
    layers: tuple[Count, ...]
    last: Count
    """What the last stage holds besides layers, but for `copies`."""
    copies: Count
    """What the last stage holds of the first one's once more where it is another (tied embeddings)."""
    has_value_head: bool = False
    """Whether it is a reward model, whose values are rewards."""
    absent: tuple[str, ...] = ()
    """What a run will need and a plan of its layout does not, a sentence each."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        return sum(part.total(self.vocab_size) for part in (self.first, *self.layers, self.last))

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in one token: all but the experts it does not visit."""
        if self.experts is None:
            return self.num_parameters
        of_experts = sum(layer.of_experts for layer in self.layers)
        return self.num_parameters - of_experts * (self.experts.num - self.experts.top_k) // self.experts.num

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has an MLP without experts."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` has experts."""
        return self.experts is not None and layer in self.experts.layers
