"""What one Hugging Face decoder is, in numbers, whatever its family.

Out: `Architecture`, from which the learner builds Megatron models and the mapping takes its rules. Pure; must never
import torch or megatron, nor read files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rlmegatron.config.partition import padded_vocab
from rlmegatron.models.rope import Rope
from rlmegatron.models.rules import Rule


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); `q_rank` None leaves queries whole."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts MLP and the arithmetic of its router.

    `shared_ffn` is the width of what every token passes through (0: nothing). A token's scores are `scoring` of the
    router's logits; with `num_groups` above 1 only experts of the best `top_groups` groups are considered, and a group
    is worth the sum of its `group_best` best scores. `bias` is added to scores for the choice alone. The weights of the
    chosen experts are their scores, divided by their sum if `normalize`, times `scale`.
    """

    num: int
    top_k: int
    ffn: int
    layers: tuple[int, ...]
    shared_ffn: int = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """One decoder; `rules(architecture, padded_vocab)` yields its parameters in the order of a checkpoint.

    `fp8_block` is the shape of the blocks in which the checkpoint's weights are quantised, if they are. `dropped` are
    patterns of tensor names that a checkpoint may hold and this model does not, each with the reason; `exported_keys`
    change in an exported config.json (None: removed). `engine_keys` are keys that SGLang asks of config.json and that
    transformers 5 no longer writes. A reward model has a `value_head` in place of the output layer.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    rules: Callable[[Architecture, int], Iterable[Rule]]
    qkv_bias: bool = False
    qk_norm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    value_head: bool = False
    fp8_block: tuple[int, int] | None = None
    dropped: tuple[tuple[str, str], ...] = ()
    exported_keys: tuple[tuple[str, object], ...] = ()
    engine_keys: tuple[tuple[str, object], ...] = ()

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding and the output layer at tensor-parallel size `tp`."""
        return padded_vocab(self.vocab_size, tensor=tp)

    def parameter_rules(self, tp: int) -> tuple[Rule, ...]:
        """The rules at tensor-parallel size `tp`."""
        return tuple(self.rules(self, self.padded_vocab(tp)))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether `layer` has experts."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def rotary_dim(self) -> int:
        """How much of a head turns with its position."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention logits are multiplied by.

        Where the whole head is rotary, YaRN's factor on cosine and sine is applied here: it enters each logit twice.
        """
        if self.latent:
            return float(self.rope.latent_scale / self.latent.key_dim**0.5)
        return float(self.rope.attention_factor**2 / self.head_dim**0.5)
