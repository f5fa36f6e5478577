"""The general transport, from one process's tensors into an engine in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loading_engine import LoadingEngine, share_of
from random_checkpoint import NAMES, architecture, checkpoint

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.replica import ReplicaLayout, stage_lookup
from rlmegatron.models.rules import stages
from rlmegatron.models.stream import TensorStream
from rlmegatron.rollout.api import EngineError
from rlmegatron.weight_sync.choose import choose_transport
from rlmegatron.weight_sync.hf_stream import HfStream


def transport_of(arch: Architecture, *, engine_tensor: int, bytes_per_bucket: int = 40_000) -> HfStream:
    tensors, parameters = checkpoint(arch), {}
    for rule in arch.parameter_rules(1):
        if not rule.copy:
            parameters[rule.parameter] = torch.zeros(rule.local_shape(1))
            for piece in rule.pieces(size=1, rank=0):
                parameters[rule.parameter][slices(piece.target)] = tensors[piece.name][slices(piece.source)]
    stream = TensorStream(
        rules=arch.parameter_rules(1),
        parameters=parameters,
        stage_of=stage_lookup(stages(num_layers=arch.num_layers, pp=1, vpp=1)),
        layout=ReplicaLayout(tp=1, pp=1),
        group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1),
        num_experts=arch.experts.num if arch.experts else 0,
    )
    return HfStream(stream, arch, engine_tensor=engine_tensor, dtype=torch.float32, bytes_per_bucket=bytes_per_bucket)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine_tensor", [1, 2, 4])
def test_the_engine_holds_the_learner_s_weights(name: str, engine_tensor: int) -> None:
    arch = architecture(name, tie_word_embeddings=name.startswith("Qwen3"))
    engine, transport = LoadingEngine(arch, tensor=engine_tensor), transport_of(arch, engine_tensor=engine_tensor)
    transport.transfer(engine)  # type: ignore[arg-type]
    transport.verify(engine)  # type: ignore[arg-type]
    assert engine.num_buckets > 3
    output = "model.layers.1.self_attn.o_proj.weight"
    for rank in range(engine_tensor):
        expected = share_of(output, checkpoint(arch)[output], arch, tp=engine_tensor, rank=rank)
        assert torch.equal(engine.parameters(rank)[output], expected)


@pytest.mark.parametrize(
    ("name", "parameter", "tensor"),
    [
        ("Qwen3ForCausalLM", "layers.1.self_attn.qkv_proj.weight", "layers.1.self_attn.v_proj.weight"),
        ("Qwen3ForCausalLM", "layers.0.mlp.gate_up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("Qwen3ForCausalLM", "norm.weight", "norm.weight"),
        ("Qwen3MoeForCausalLM", "layers.0.mlp.experts.w13_weight", "layers.0.mlp.experts.4.up_proj.weight"),
        ("DeepseekV3ForCausalLM", "layers.0.self_attn.w_vc", "layers.0.self_attn.kv_b_proj.weight"),
        ("DeepseekV3ForCausalLM", "layers.1.mlp.gate.e_score_correction_bias", None),
    ],
)
def test_one_wrong_bit_on_one_rank_is_found_and_named(name: str, parameter: str, tensor: str | None) -> None:
    arch = architecture(name, moe_intermediate_size=128) if "Moe" in name else architecture(name)
    engine, transport = LoadingEngine(arch, tensor=2), transport_of(arch, engine_tensor=2)
    transport.transfer(engine)  # type: ignore[arg-type]
    engine.spoil = (1, f"model.{parameter}")
    with pytest.raises(EngineError) as caught:
        transport.verify(engine)  # type: ignore[arg-type]
    assert "1 of " in str(caught.value)
    parameter = parameter.replace("w_vc", "w_vc.mT")
    assert f"the first is model.{tensor or parameter} (in model.{parameter}) on engine ranks [1]" in str(caught.value)


def test_what_the_engine_does_not_have_is_named() -> None:
    """SGLang gives every layer of a Qwen3-MoE experts, whatever mlp_only_layers says, and skips tensors it lacks."""
    arch = architecture("Qwen3MoeForCausalLM", mlp_only_layers=[1])
    engine, transport = LoadingEngine(arch, tensor=1), transport_of(arch, engine_tensor=1)
    transport.transfer(engine)  # type: ignore[arg-type]
    del engine.parts[0]["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(EngineError, match=r"down_proj.weight \(there is no model.layers.1.mlp.down_proj.weight\)"):
        transport.verify(engine)  # type: ignore[arg-type]


def test_a_parameter_of_another_shape_is_named() -> None:
    arch = architecture("LlamaForCausalLM")
    engine, transport = LoadingEngine(arch, tensor=1), transport_of(arch, engine_tensor=1)
    transport.transfer(engine)  # type: ignore[arg-type]
    engine.parts[0]["model.norm.weight"][0, 0] = torch.ones(47)
    with pytest.raises(EngineError, match=r"model.norm.weight of shape \[47\] has no box \[\[0, 48\]\]"):
        transport.verify(engine)  # type: ignore[arg-type]


def test_a_later_transfer_is_verified_against_the_later_weights() -> None:
    arch = architecture("Qwen2ForCausalLM")
    engine, transport = LoadingEngine(arch, tensor=2), transport_of(arch, engine_tensor=2)
    transport.transfer(engine)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in transport._stream.parameters.values():
            parameter.mul_(1.5)
    transport.transfer(engine)  # type: ignore[arg-type]
    transport.verify(engine)  # type: ignore[arg-type]
    norm = checkpoint(arch)["model.norm.weight"]
    assert torch.equal(engine.parameters(0)["model.norm.weight"], norm * 1.5)


class CountingStream:
    """Counts the buckets that were taken from a stream."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.taken, self.asked = stream, 0, []

    def buckets(self, *, receive: bool, **settings: Any) -> Any:
        self.asked.append(receive)
        for bucket in self.stream.buckets(receive=receive, **settings):
            self.taken += 1
            yield bucket


def test_a_refused_bucket_does_not_stop_the_stream() -> None:
    """The other ranks are in it; the engine gets nothing more, and the error comes at the end."""
    arch = architecture("LlamaForCausalLM")
    transport = transport_of(arch, engine_tensor=1)
    num_buckets = len(list(transport._stream.buckets(bytes_per_bucket=40_000, dtype=torch.float32, receive=False)))
    counting = CountingStream(transport._stream)
    transport._stream = counting  # type: ignore[assignment]
    engine = LoadingEngine(arch, tensor=1, fails_at_bucket=2)
    with pytest.raises(RuntimeError, match="bucket 2 was refused"):
        transport.transfer(engine)  # type: ignore[arg-type]
    assert (engine.num_buckets, counting.taken) == (2, num_buckets) and num_buckets > 4


def test_a_rank_without_engine_only_takes_part() -> None:
    transport = transport_of(architecture("LlamaForCausalLM"), engine_tensor=1)
    counting = CountingStream(transport._stream)
    transport._stream = counting  # type: ignore[assignment]
    transport.transfer(None)
    assert counting.asked == [False] and counting.taken > 4


def test_auto_is_the_general_transport() -> None:
    from rlmegatron.config.schema import WeightSyncConfig

    assert choose_transport(WeightSyncConfig(transport="auto"))[0] == HfStream.name
    assert choose_transport(WeightSyncConfig(transport="hf_stream")) == ("hf_stream", "configured")
