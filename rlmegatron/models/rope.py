"""Rotary positions: base, scaling kinds, and the frequencies that follow from them.

In: the rope keys of a config.json, in either spelling. Out: `Rope`, whose numbers are those of transformers'
`modeling_rope_utils.py`. Reading must never import torch or megatron; torch is loaded where frequencies are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlmegatron.models.config_keys import ConfigKeys

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["default", "linear", "llama3", "yarn"]
_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """`factor` and what follows it belong to the scaling kind; a plain rope has none of them."""

    base: float
    kind: Kind = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """What cosine and sine are multiplied by (YaRN, arXiv 2309.00071, section 3.4)."""
    mscale_all_dim: float = 0.0
    """How strongly `factor` enters the softmax scale of latent attention (DeepSeek-V2's code)."""

    @property
    def latent_scale(self) -> float:
        """What the softmax scale of latent attention is multiplied by."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def inverse_frequencies(self, dim: int) -> Tensor:
        """Radians per position of each of the dim / 2 rotating pairs, fp32, to the last bit those of transformers."""
        import torch

        plain = 1.0 / (self.base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        return self._yarn(dim) if self.kind == "yarn" else plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long waves are stretched, short ones kept, those between blended (Llama 3.1)."""
        import torch

        low, high, positions = self.low_freq_factor, self.high_freq_factor, self.original_positions
        waves = 2 * math.pi / plain
        smooth = (positions / waves - low) / (high - low)
        blended = (1 - smooth) * plain / self.factor + smooth * plain
        short_or_blended = torch.where(waves < positions / high, plain, blended)
        return torch.where(waves > positions / low, plain / self.factor, short_or_blended)

    def _yarn(self, dim: int) -> Tensor:
        """Pairs that turn often within the original context are kept, the others stretched (section 3.2)."""
        import torch

        low, high = self._pair_of(self.beta_fast, dim), self._pair_of(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        span = high - low if high != low else 0.001
        kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        waves = self.base ** (torch.arange(0, dim, 2).float() / dim)
        return 1.0 / (self.factor * waves) * (1 - kept) + 1.0 / waves * kept

    def _pair_of(self, turns: float, dim: int) -> float:
        """The pair that turns `turns` times within the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def read_rope(keys: ConfigKeys, *, default_base: float = 10000.0) -> Rope:
    """Accepts `rope_theta` + `rope_scaling` and transformers 5's `rope_parameters`; every key in it is understood."""
    parameters, scaling = keys.optional("rope_parameters") or {}, keys.optional("rope_scaling") or {}
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise ValueError("config.json: rope_parameters and rope_scaling must be objects")
    rope = RopeKeys({**parameters, **scaling})
    base = float(rope.take("rope_theta", keys.optional("rope_theta") or default_base))
    keys.optional("rope_theta")
    kind = str(rope.take("rope_type", rope.take("type", "default")))
    rope.take("type", None)
    partial = float(rope.take("partial_rotary_factor", None) or keys.optional("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor = {partial} is not supported; it must be 1")
    if kind not in _KINDS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    found = _SCALINGS[kind](rope, base, keys)
    rope.refuse_the_rest(kind)
    return found


class RopeKeys:
    """The keys of one rope object, taken one by one; what is left over is not understood."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = dict(values)

    def take(self, key: str, default: Any) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        value = self.values.pop(key, None)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.take(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"config.json: rope scaling needs {key}, a number above 0; it has {value!r}")
        return float(value)

    def refuse_the_rest(self, kind: str) -> None:
        """ValueError names what has not been taken and is not null."""
        left = sorted(key for key, value in self.values.items() if value is not None)
        if left:
            raise ValueError(f"config.json: rope scaling {kind!r} has {', '.join(left)}, which is not understood")


def _default(rope: RopeKeys, base: float, _: ConfigKeys) -> Rope:
    rope.take("factor", None)
    rope.take("original_max_position_embeddings", None)
    return Rope(base)


def _linear(rope: RopeKeys, base: float, _: ConfigKeys) -> Rope:
    return Rope(base, "linear", rope.number("factor"), int(rope.take("original_max_position_embeddings", 0)))


def _llama3(rope: RopeKeys, base: float, keys: ConfigKeys) -> Rope:
    return Rope(
        base,
        "llama3",
        rope.number("factor"),
        int(rope.number("original_max_position_embeddings")),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _yarn(rope: RopeKeys, base: float, keys: ConfigKeys) -> Rope:
    positions = keys.positive("max_position_embeddings")
    original = int(rope.number("original_max_position_embeddings", positions))
    factor = rope.number("factor", positions / original)
    mscale, all_dim = float(rope.take("mscale", 0.0)), float(rope.take("mscale_all_dim", 0.0))
    both = mscale and all_dim
    inferred = _mscale(factor, mscale) / _mscale(factor, all_dim) if both else _mscale(factor, 1.0)
    return Rope(
        base,
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=bool(rope.take("truncate", True)),
        attention_factor=float(rope.take("attention_factor", inferred)),
        mscale_all_dim=all_dim,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
