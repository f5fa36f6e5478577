"""What one Hugging Face decoder is, in numbers, whatever its family.

In: a parsed config.json. Out: `Architecture`, from which the learner builds Megatron models and the mapping takes its
rules. Pure; must never import torch or megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmegatron.models.rules import Rule


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: base and, for the `llama3` kind, the frequency scaling of Llama 3.1."""

    base: float
    llama3_factor: float | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Rope:
        """Accepts `rope_theta` + `rope_scaling` and transformers 5's `rope_parameters`; refuses what Megatron lacks."""
        rope = config.get("rope_parameters") or {}
        base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        scaling = config.get("rope_scaling") or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if float(config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
        if kind == "default":
            return cls(float(base))
        if kind == "llama3":
            fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            for key, value in fixed.items():
                if float(scaling.get(key, value)) != value:
                    raise ValueError(f"config.json: rope scaling {key} = {scaling[key]} is not supported; use {value}")
            if "factor" not in scaling:
                raise ValueError("config.json: rope type 'llama3' needs a factor")
            return cls(float(base), float(scaling["factor"]))
        raise ValueError(f"config.json: rope type {kind!r} is not supported; use 'default' or 'llama3'")


@dataclass(frozen=True)
class Architecture:
    """One decoder; `rules(architecture, padded_vocab)` yields its parameters in the order of a checkpoint."""

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
    qkv_bias: bool
    qk_norm: bool
    rules: Callable[[Architecture, int], Iterable[Rule]]

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rounded up so that every tensor-parallel rank holds a multiple of 8 rows (tensor-core shapes)."""
        multiple = 8 * tp
        return -(-self.vocab_size // multiple) * multiple

    def parameter_rules(self, tp: int) -> tuple[Rule, ...]:
        """The rules at tensor-parallel size `tp`."""
        return tuple(self.rules(self, self.padded_vocab(tp)))


def positive(config: Mapping[str, Any], key: str) -> int:
    """A required whole number above 0."""
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config.json: {key} must be a whole number above 0, got {value!r}")
    return value


def positive_number(config: Mapping[str, Any], key: str) -> float:
    """A required number above 0."""
    value = config.get(key)
    if not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"config.json: {key} must be a number above 0, got {value!r}")
    return float(value)


def refuse(config: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Refuse keys whose value would change the numbers in a way that is not built."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise ValueError(f"config.json: {key} = {config[key]!r} is not supported; supported: {values[0]!r}")
