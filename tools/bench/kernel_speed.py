"""How fast the segment kernel fills one engine rank from the training ranks' buffers, beside a plain copy.

In: a model and a layout. Out: bytes per second of both, for as many bytes, measured alternately on one device that
holds all buffers. Must never communicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench.stand_in_model import ModelSpec, StandInModel
from bench.sync_layout import SyncLayout
from bench.synthetic_model import TrainShard

from rlmegatron.models.architecture import Architecture
from rlmegatron.weight_sync.bind import direct
from rlmegatron.weight_sync.engine_parameters import EngineParameters
from rlmegatron.weight_sync.plan import plan_pieces
from rlmegatron.weight_sync.segments import SegmentTable, copy_segments
from rlmegatron.weight_sync.shared_parameters import SharedParameters
from rlmegatron.weight_sync.sources import TrainRanks


@dataclass(frozen=True)
class KernelSpeed:
    """Bytes written per second, by round."""

    num_bytes: int
    num_segments: int
    kernel: list[float]
    plain: list[float]


def kernel_speed(
    arch: Architecture,
    layout: SyncLayout,
    *,
    train_dtype: torch.dtype,
    engine_dtype: torch.dtype,
    device: str,
    num_rounds: int,
) -> KernelSpeed:
    """Of rank 0 of the first engine; takes the memory of a whole model and 3 shares of an engine rank on `device`."""
    model = StandInModel(ModelSpec(arch, layout.engine_tensor, 0, engine_dtype, True, device, layout.engine_expert))
    live = dict(model.named_parameters())
    described = {name: [tuple(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in live.items()}
    wanted = EngineParameters.of(described).wanted(model.spec.placements())
    shards = [TrainShard(arch, layout, rank=rank, dtype=train_dtype, device=device) for rank in range(layout.num_ranks)]
    shared = [SharedParameters(shard.rules, shard.parameters) for shard in shards]
    stream = shards[0]
    pieces = plan_pieces(stream.rules, wanted, layout.train, stage_of=stream.stage_of)
    num_experts = arch.experts.num if arch.experts else 0
    ranks = TrainRanks(layout.train, layout.num_ranks, layout.num_ranks, num_experts)
    source_ranks = ranks.source_ranks(pieces, on=layout.engines[0][0])
    found = direct(pieces, source_ranks, {rank: one.book for rank, one in enumerate(shared)})
    sources = [shared[rank].storages[number] for rank, number in found.storages]
    targets = [parameter.detach() for parameter in live.values()]
    table = SegmentTable.of(found.table, sources, targets)
    source = torch.zeros(table.num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    kernel, plain = [], []
    for _ in range(num_rounds + 1):
        kernel.append(table.num_bytes / _seconds(lambda: copy_segments(table, sources, targets), device))
        plain.append(table.num_bytes / _seconds(lambda: target.copy_(source), device))
    return KernelSpeed(table.num_bytes, len(found.table), kernel[1:], plain[1:])


def _seconds(work: Callable[[], object], device: str) -> float:
    """On a CUDA device by its own clock, without the launch."""
    if not device.startswith("cuda"):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3
