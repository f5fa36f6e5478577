"""Verification compares every element of every tensor, wherever it lies, and names what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loading_engine import LoadingEngine
from random_checkpoint import NAMES, architecture
from test_hf_stream import stream_of

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.stream import TensorStream
from rlmegatron.rollout.api import EngineError
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.hf_stream import HfStream
from rlmegatron.weight_sync.verify import Verifier


class Alone:
    """The one rank of a world."""

    device = torch.device("cpu")

    def settle(self, phase: str, work: Callable[[], Any]) -> Any:
        return work()


class Published:
    """An engine that a stream was loaded into, and what verifies it."""

    def __init__(self, arch: Architecture, *, tensor: int, expert: int = 1) -> None:
        self.engine, self.stream = LoadingEngine(arch, tensor=tensor, expert=expert), stream_of(arch)
        self.transport = HfStream(self.stream, arch, dtype=torch.float32, bytes_per_bucket=40_000)
        self.verifier = Verifier(
            Alone(),  # type: ignore[arg-type]
            self.stream,
            arch,
            Engines((), tensor=tensor, expert=expert, dtype=torch.float32),
        )
        self.transfer()

    def transfer(self) -> None:
        self.transport.transfer(self.engine)  # type: ignore[arg-type]

    def verify(self) -> None:
        self.verifier.verify(self.engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_an_engine_that_was_loaded_from_the_learner_passes(name: str, tensor: int) -> None:
    """With KV heads that several ranks hold alike, padding, tied embeddings and derived tensors."""
    Published(architecture(name, tie_word_embeddings=name.startswith("Qwen3")), tensor=tensor).verify()


@pytest.mark.parametrize(
    ("name", "parameter", "tensor"),
    [
        ("Qwen3ForCausalLM", "layers.1.self_attn.qkv_proj.weight", "layers.1.self_attn.v_proj.weight"),
        ("Qwen3ForCausalLM", "layers.0.mlp.gate_up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("Qwen3MoeForCausalLM", "layers.0.mlp.experts.w13_weight", "layers.0.mlp.experts.4.up_proj.weight"),
        ("DeepseekV3ForCausalLM", "layers.0.self_attn.w_vc", "layers.0.self_attn.kv_b_proj.weight"),
    ],
)
def test_one_wrong_bit_on_one_rank_is_found_and_its_tensor_named(name: str, parameter: str, tensor: str) -> None:
    found = Published(architecture(name, moe_intermediate_size=128) if "Moe" in name else architecture(name), tensor=2)
    found.engine.spoil = (1, f"model.{parameter}")
    with pytest.raises(EngineError) as caught:
        found.verify()
    assert f" 1 of {len(found.stream.tensors(torch.float32))} tensors differ" in str(caught.value)
    assert f"the first is model.{tensor} (" in str(caught.value) and f"in model.{parameter}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("Qwen3ForCausalLM", "norm.weight"),
        ("DeepseekV3ForCausalLM", "layers.1.mlp.gate.e_score_correction_bias"),
    ],
)
def test_ranks_that_should_hold_the_same_and_do_not_are_named(name: str, parameter: str) -> None:
    found = Published(architecture(name), tensor=2)
    found.engine.spoil = (1, f"model.{parameter}")
    with pytest.raises(EngineError, match=rf"model.{parameter} \(engine ranks \[0, 1\] hold it differently\)"):
        found.verify()


def test_what_the_engine_does_not_have_is_named() -> None:
    """SGLang gives every layer of a Qwen3-MoE experts, whatever mlp_only_layers says, and skips tensors it lacks."""
    found = Published(architecture("Qwen3MoeForCausalLM", mlp_only_layers=[1]), tensor=1)
    del found.engine.parts[0]["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(EngineError, match=r"down_proj.weight \(on engine rank 0: there is no model.layers.1.mlp.down_"):
        found.verify()


def test_a_parameter_of_another_shape_is_named() -> None:
    found = Published(architecture("LlamaForCausalLM"), tensor=1)
    found.engine.parts[0]["model.norm.weight"][0, 0] = torch.ones(47)
    with pytest.raises(EngineError, match=r"model.norm.weight of shape \[47\] has no box \[\[0, 48\]\]"):
        found.verify()


def change(stream: TensorStream) -> None:
    with torch.no_grad():
        for parameter in stream.parameters.values():
            parameter.mul_(1.5)


def test_what_the_learner_holds_now_counts() -> None:
    found = Published(architecture("Qwen2ForCausalLM"), tensor=2)
    change(found.stream)
    with pytest.raises(EngineError, match="tensors differ"):
        found.verify()
    found.transfer()
    found.verify()
