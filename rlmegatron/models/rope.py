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
    mscale: float = 0.0
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
    """Accepts `rope_theta` + `rope_scaling` and transformers 5's `rope_parameters`; every key in it is understood.

    ValueError where two spellings of one thing contradict each other.
    """
    rope = RopeKeys(_rope_object(keys))
    outer_base = keys.positive_number("rope_theta", default_base)
    base = rope.number("rope_theta", outer_base)
    if keys.optional("rope_theta") is not None and base != outer_base:
        raise ValueError(f"config.json: rope_theta is {outer_base} and {base} in rope_parameters; keep one")
    for partial in (keys.optional("partial_rotary_factor"), rope.take("partial_rotary_factor", None)):
        if partial not in (None, 1):
            raise ValueError(f"config.json: partial_rotary_factor = {partial!r} is not supported; it must be 1")
    kind = _kind(rope)
    found = _SCALINGS[kind](rope, base, keys)
    rope.refuse_the_rest(kind)
    return found


def _rope_object(keys: ConfigKeys) -> dict[str, Any]:
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        values = keys.optional(name)
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"config.json: {name} must be an object, got {values!r}")
        if values:
            found.append(values)
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(f"config.json: rope_parameters = {found[0]} and rope_scaling = {found[1]} differ; keep one")
    return found[0] if found else {}


def _kind(rope: RopeKeys) -> str:
    """`type` is what older configs call it. Both may be given: Qwen2-VL says mrope in one and default in the other."""
    given = [kind for key in ("rope_type", "type") if (kind := rope.take(key, None)) is not None]
    unknown = [kind for kind in given if kind not in _SCALINGS]
    if unknown:
        raise ValueError(f"config.json: rope type {unknown[0]!r} is not supported; supported: {', '.join(_SCALINGS)}")
    if len(set(given)) > 1:
        raise ValueError(f"config.json: rope_type is {given[0]!r} and type {given[1]!r}; keep one")
    return str(given[0]) if given else "default"


class RopeKeys:
    """The keys of one rope object, taken one by one; what is left over is not understood."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = dict(values)

    def take(self, key: str, default: Any) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        value = self.values.pop(key, None)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; a `default` of 0 allows 0 too."""
        value = self.take(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (0 < value < math.inf or (value == 0 and default == 0)):
            raise ValueError(f"config.json: rope scaling needs {key}, a number above 0; it has {value!r}")
        return float(value)

    def positions(self, default: float | None = None) -> int:
        """The length of the context before it was stretched."""
        value = self.number("original_max_position_embeddings", default)
        if value != int(value):
            raise ValueError(f"config.json: original_max_position_embeddings must be a whole number, got {value}")
        return int(value)

    def refuse_the_rest(self, kind: str) -> None:
        """ValueError names what has not been taken and is not null."""
        left = [f"{key} = {value!r}"[:120] for key, value in sorted(self.values.items()) if value is not None]
        if left:
            raise ValueError(f"config.json: rope scaling {kind!r} has {', '.join(left)}, which is not understood")


def _default(rope: RopeKeys, base: float, _: ConfigKeys) -> Rope:
    factor = rope.take("factor", 1)
    if factor != 1:
        raise ValueError(f"config.json: rope scaling of type 'default' has factor {factor!r}, which would do nothing")
    rope.take("original_max_position_embeddings", None)
    return Rope(base)


def _linear(rope: RopeKeys, base: float, _: ConfigKeys) -> Rope:
    return Rope(base, "linear", rope.number("factor"), rope.positions(0))


def _llama3(rope: RopeKeys, base: float, _: ConfigKeys) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ValueError(
            f"config.json: rope scaling 'llama3': low_freq_factor {low} must be below high_freq_factor {high}"
        )
    return Rope(
        base,
        "llama3",
        rope.number("factor"),
        rope.positions(),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: RopeKeys, base: float, keys: ConfigKeys) -> Rope:
    positions = keys.positive("max_position_embeddings")
    original = rope.positions(positions)
    factor = rope.number("factor", positions / original)
    mscale, all_dim = (rope.number(key) if key in rope.values else 0.0 for key in ("mscale", "mscale_all_dim"))
    truncate = rope.take("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(f"config.json: rope scaling 'yarn': truncate must be true or false, got {truncate!r}")
    return Rope(
        base,
        "yarn",
        factor,
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=truncate,
        attention_factor=rope.number("attention_factor", inferred_attention_factor(factor, mscale, all_dim)),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def inferred_attention_factor(factor: float, mscale: float, all_dim: float) -> float:
    """What cosine and sine are multiplied by where config.json does not say; 0 stands for an absent key."""
    both = mscale and all_dim
    return _mscale(factor, mscale) / _mscale(factor, all_dim) if both else _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
