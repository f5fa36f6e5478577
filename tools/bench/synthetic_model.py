"""A made-up model of a given family and size, and one rank's shard of it, whose every element follows from its place.

In: a family, a size and a layout. Out: an `Architecture` and parameters as a learner has them, by rule. Content is a
hash of an element's place in its Hugging Face tensor, so that shards of any layout agree, and what an engine should
hold can be computed anywhere. Must never import megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from bench.sync_layout import SyncLayout
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.replica import stage_lookup
from rlmegatron.models.rules import Box, Part, Rule, on_stage, stages
from rlmegatron.models.stream import TensorStream
from rlmegatron.models.table import architecture_of

_WIDTHS = (8192, 6144, 5120, 4096, 3072, 2048, 1536, 1024, 768, 512, 256, 128)
_FEWEST_LAYERS = 8
_MOST_VOCABULARY = 131072
_HEADS, _KV_HEADS, _EXPERTS = 16, 8, 16
_ALIGNMENT = 64  # elements; Megatron's distributed optimizer starts parameters at such multiples
_ELEMENTS_AT_ONCE = 1 << 22
_SPREAD, _MIX = -1640531535, -2048144789  # odd numbers of 32 bits with no pattern


def architecture_for(family: str, *, num_bytes: float, itemsize: int, layer_multiple: int) -> Architecture:
    """About `num_bytes` of the family: as wide as still gives some layers, their number a multiple of pp * vpp.

    The vocabulary has 32 rows per column, as that of real models of this size, and is a multiple of 1024.
    """
    if family not in FAMILIES:
        raise ValueError(f"--family {family}: not known; known are {', '.join(FAMILIES)}")
    wanted = num_bytes / itemsize
    fewest = max(_FEWEST_LAYERS, layer_multiple)
    for width in _WIDTHS:
        two, three = (num_elements(architecture_of(_config(family, width, layers))) for layers in (2, 3))
        layers = max(-(-2 // layer_multiple), round((2 + (wanted - two) / (three - two)) / layer_multiple))
        layers *= layer_multiple
        if layers >= fewest or width == _WIDTHS[-1]:
            return architecture_of(_config(family, width, layers))
    raise AssertionError("the narrowest is always taken")


def num_elements(arch: Architecture) -> int:
    """Of a checkpoint."""
    return sum(prod(part.shape) for rule in arch.parameter_rules(1) if not rule.copy for part in rule.parts)


def _config(family: str, width: int, layers: int) -> dict[str, Any]:
    name, extra = FAMILIES[family]
    vocabulary = min(32 * width, _MOST_VOCABULARY)
    config = {
        "architectures": [name],
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return {**config, **{key: value(width) if callable(value) else value for key, value in extra.items()}}


_HEAD_DIM = {"head_dim": lambda width: width // _HEADS}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": _HEADS,
    "kv_lora_rank": lambda width: width // 4,
    "qk_nope_head_dim": lambda width: width // _HEADS,
    "qk_rope_head_dim": 16,
    "v_head_dim": lambda width: width // _HEADS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": lambda width: width // 2,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", _HEAD_DIM),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _HEAD_DIM),
    "mistral": ("MistralForCausalLM", {**_HEAD_DIM, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **_HEAD_DIM,
            "num_experts": _EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": lambda width: width // 2,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": _EXPERTS, "num_experts_per_tok": 2, "intermediate_size": lambda width: width},
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "q_lora_rank": lambda width: width // 2,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
}
"""What --family may name: the architecture and its keys; a function is given the width."""


def refuse_misfit(arch: Architecture, layout: SyncLayout) -> None:
    """ValueError for a model that a layout cannot cut evenly."""
    num_experts = arch.experts.num if arch.experts else 1
    train = layout.train
    for name, size in (("ep", train.ep), ("etp", train.etp), ("the engine's ep", layout.engine_expert)):
        if size > 1 and not arch.experts:
            raise ValueError(f"--layout {layout.text}: {arch.name} has no experts, so {name} must be 1")
        if name != "etp" and num_experts % size:
            raise ValueError(f"--layout {layout.text}: {name} ({size}) does not divide {num_experts} experts")
    for rule in arch.parameter_rules(train.tp):
        try:
            for _ in rule.pieces(size=train.tp if rule.axis == "tp" else train.etp, rank=0):
                pass
        except ValueError as error:
            raise ValueError(f"--layout {layout.text}: {error}") from None


def content(part: Part, box: Box, *, seed: int, out: Tensor) -> None:
    """Write `tensor(part.name)[box]` into `out`, which has that shape: finite numbers in [-1, 1) of 24 random bits."""
    rows, columns = box if len(box) == 2 else ((0, 1), *box)
    start = crc32(f"{part.name} {seed}".encode())
    across = torch.arange(*columns, dtype=torch.int32) * _SPREAD + _wrap(start)
    matrix = out.view(rows[1] - rows[0], -1)
    step = max(1, _ELEMENTS_AT_ONCE // len(across))
    for first in range(*rows, step):
        last = min(first + step, rows[1])
        down = torch.arange(first, last, dtype=torch.int32) * _wrap(part.shape[-1] * _SPREAD)
        hashed = down[:, None] + across
        hashed ^= hashed >> 15
        hashed *= _MIX
        hashed >>= 8
        matrix[first - rows[0] : last - rows[0]] = hashed.float().mul_(2.0**-23)


def _wrap(number: int) -> int:
    """Modulo 2^32, as a signed number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


class TrainShard:
    """One rank's parameters, by rule, in one contiguous buffer for each type, as Megatron's DDP lays them out."""

    def __init__(
        self, arch: Architecture, layout: SyncLayout, *, rank: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        """All parameters are 0 until `fill`."""
        self.arch, self.layout, self.dtype, self._device = arch, layout, dtype, device
        self.rules = arch.parameter_rules(layout.train.tp)
        self.place = layout.place(rank)
        self.stages = stages(num_layers=arch.num_layers, pp=layout.train.pp, vpp=layout.vpp)
        self.stage_of = stage_lookup(self.stages)
        self.held = list(self._held())
        self.parameters: dict[str, Tensor] = {}
        self.buffers: list[Tensor] = []
        for keeps_fp32 in (False, True):
            self._allot([rule for rule in self.held if rule.keeps_fp32 is keeps_fp32], keeps_fp32)

    def _held(self) -> Iterator[Rule]:
        num_experts = self.arch.experts.num if self.arch.experts else 0
        num_local = num_experts // self.layout.train.ep
        first = self.place.ep_rank * num_local
        for chunk in range(self.layout.vpp):
            stage = self.stages[self.place.pp_rank, chunk]
            for _, _, rule in on_stage(self.rules, stage, range(first, first + num_local)):
                yield rule

    def _allot(self, rules: Iterable[Rule], keeps_fp32: bool) -> None:
        """Later parameters lie first, since their gradients come first."""
        shapes = {rule.parameter: rule.local_shape(self.cut(rule)[0]) for rule in rules}
        if not shapes:
            return
        starts, end = {}, 0
        for parameter in reversed(shapes):
            starts[parameter] = end
            end += -(-prod(shapes[parameter]) // _ALIGNMENT) * _ALIGNMENT
        buffer = torch.zeros(end, dtype=torch.float32 if keeps_fp32 else self.dtype, device=self._device)
        self.buffers.append(buffer)
        for parameter, shape in shapes.items():
            self.parameters[parameter] = buffer[starts[parameter] :][: prod(shape)].view(shape)

    def cut(self, rule: Rule) -> tuple[int, int]:
        """(size, rank) of the axis that cuts `rule`."""
        return self.layout.train.cut(rule, self.place)

    def fill(self, *, seed: int) -> None:
        """New weights, in place; padding of the vocabulary stays 0."""
        for rule in self.held:
            size, rank = self.cut(rule)
            write_shard(rule, self.parameters[rule.parameter], size=size, rank=rank, seed=seed)

    def stream(self, group: dist.ProcessGroup) -> TensorStream:
        """As `learner.model.ShardedModel.tensor_stream`; `group` is that of this rank's replica."""
        return TensorStream(
            rules=self.rules,
            parameters=self.parameters,
            stage_of=self.stage_of,
            layout=self.layout.train,
            group=group,
            num_experts=self.arch.experts.num if self.arch.experts else 0,
        )


def write_shard(rule: Rule, parameter: Tensor, *, size: int, rank: int, seed: int) -> None:
    """What rank `rank` of `size` on the rule's axis holds of it."""
    parts = {part.name: part for part in rule.parts}
    for piece in rule.pieces(size=size, rank=rank):
        target = parameter[slices(piece.target)]
        whole = torch.empty(target.shape, dtype=torch.float32)
        content(parts[piece.name], piece.source, seed=seed, out=whole)
        target.copy_(whole)
