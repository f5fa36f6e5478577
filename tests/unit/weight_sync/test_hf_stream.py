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
from rlmegatron.weight_sync.hf_stream import HfStream


def stream_of(arch: Architecture) -> TensorStream:
    tensors, parameters = checkpoint(arch), {}
    for rule in arch.parameter_rules(1):
        if not rule.copy:
            parameters[rule.parameter] = torch.zeros(rule.local_shape(1))
            for piece in rule.pieces(size=1, rank=0):
                parameters[rule.parameter][slices(piece.target)] = tensors[piece.name][slices(piece.source)]
    return TensorStream(
        rules=arch.parameter_rules(1),
        parameters=parameters,
        stage_of=stage_lookup(stages(num_layers=arch.num_layers, pp=1, vpp=1)),
        layout=ReplicaLayout(tp=1, pp=1),
        group=dist.ProcessGroupGloo(dist.HashStore(), 0, 1),
        num_experts=arch.experts.num if arch.experts else 0,
    )


def transport_of(arch: Architecture, *, bytes_per_bucket: int = 40_000) -> HfStream:
    return HfStream(stream_of(arch), arch, dtype=torch.float32, bytes_per_bucket=bytes_per_bucket)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine_tensor", [1, 2, 4])
def test_the_engine_holds_the_learner_s_weights(name: str, engine_tensor: int) -> None:
    arch = architecture(name, tie_word_embeddings=name.startswith("Qwen3"))
    engine, transport = LoadingEngine(arch, tensor=engine_tensor), transport_of(arch)
    transport.transfer(engine)  # type: ignore[arg-type]
    assert engine.num_buckets > 3
    output = "model.layers.1.self_attn.o_proj.weight"
    for rank in range(engine_tensor):
        expected = share_of(output, checkpoint(arch)[output], arch, tp=engine_tensor, rank=rank)
        assert torch.equal(engine.parameters(rank)[output], expected)


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
    transport = transport_of(arch)
    num_buckets = len(list(transport._stream.buckets(bytes_per_bucket=40_000, dtype=torch.float32, receive=False)))
    counting = CountingStream(transport._stream)
    transport._stream = counting  # type: ignore[assignment]
    engine = LoadingEngine(arch, tensor=1, fails_at_bucket=2)
    with pytest.raises(RuntimeError, match="bucket 2 was refused"):
        transport.transfer(engine)  # type: ignore[arg-type]
    assert (engine.num_buckets, counting.taken) == (2, num_buckets) and num_buckets > 4


def test_a_rank_without_engine_only_takes_part() -> None:
    transport = transport_of(architecture("LlamaForCausalLM"))
    counting = CountingStream(transport._stream)
    transport._stream = counting  # type: ignore[assignment]
    transport.transfer(None)
    assert counting.asked == [False] and counting.taken > 4
