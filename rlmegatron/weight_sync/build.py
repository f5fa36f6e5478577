"""Puts together what a run publishes with: the transport that its configuration asks for.

In: the weight_sync section, the policy's `TensorStream`, where engines lie and how they are cut. Out: a `Transport`.
Must never move a weight itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlmegatron.config.schema import WeightSyncConfig
from rlmegatron.distributed.world import World
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.stream import TensorStream
from rlmegatron.weight_sync.choose import choose_transport
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.hf_stream import HfStream
from rlmegatron.weight_sync.reshard import Reshard, ReshardSettings
from rlmegatron.weight_sync.segments import is_built
from rlmegatron.weight_sync.transport import Transport


def build_transport(
    config: WeightSyncConfig,
    world: World,
    stream: TensorStream,
    arch: Architecture,
    engines: Engines,
    *,
    train_dtype: str,
    engine_dtype: str,
    timeout_s: float,
    cache: Path | None,
    say: Callable[[str], None],
) -> Transport:
    """`train_dtype` and `engine_dtype` are types by their names in a config; `say` prints the choice, its reason, and
    later what the plan moves."""
    num_nodes = -(-world.size // world.ranks_per_node)
    name, reason = choose_transport(config, train_dtype=train_dtype, engine_dtype=engine_dtype, num_nodes=num_nodes)
    say(f"weight sync: {name} ({reason})")
    bucket = config.bucket_mb << 20
    if name == "hf_stream":
        return HfStream(stream, arch, dtype=engines.dtype, bytes_per_bucket=bucket)
    if not is_built(world.device.type):
        say(
            "weight sync: the kernel for copies was not built, and torch makes them one by one, slowly; install the "
            "package again where a compiler is (c++, for GPUs nvcc)"
        )
    settings = ReshardSettings(bytes_per_bucket=bucket, timeout_s=timeout_s, cache=cache)
    return Reshard(name, stream, arch, engines, world, settings, say=say)
