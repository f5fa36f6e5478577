"""Architectures, random checkpoints in memory, and one process's stream of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.rules import stages
from rlmegatron.models.stream import TensorStream, stage_lookup
from rlmegatron.models.table import FAMILIES

CONFIG: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "head_dim": 6,
}


@pytest.fixture
def make_architecture() -> Callable[..., Architecture]:
    """`make_architecture("Qwen3ForCausalLM", vocab_size=..., ...)`."""

    def make(name: str = "Qwen3ForCausalLM", **changes: Any) -> Architecture:
        return FAMILIES[name]({**CONFIG, "architectures": [name], **changes})

    return make


@pytest.fixture
def make_tensors() -> Callable[[Architecture], dict[str, Tensor]]:
    """A random checkpoint: Hugging Face name -> tensor."""

    def make(arch: Architecture) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        parts = {part.name: part.shape for rule in arch.parameter_rules(1) for part in rule.parts}
        return {name: torch.randn(shape, generator=generator) for name, shape in parts.items()}

    return make


@pytest.fixture
def make_stream() -> Callable[[Architecture, dict[str, Tensor]], TensorStream]:
    """The stream of an unsharded model that holds these tensors, in a group of this process alone."""

    def make(arch: Architecture, tensors: dict[str, Tensor]) -> TensorStream:
        parameters = {}
        for rule in arch.parameter_rules(1):
            parameters[rule.parameter] = torch.zeros(rule.local_shape(1))
            for piece in rule.pieces(tp=1, rank=0):
                parameters[rule.parameter][slices(piece.target)] = tensors[piece.name][slices(piece.source)]
        return TensorStream(
            rules=arch.parameter_rules(1),
            parameters=parameters,
            stage_of=stage_lookup(stages(num_layers=arch.num_layers, pp=1, vpp=1)),
            places=[(0, 0)],
            group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1),
            tp=1,
        )

    return make
