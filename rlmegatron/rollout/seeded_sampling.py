"""Makes a request's `sampling_seed` alone decide its sample, inside an engine's scheduler process.

In: SGLang's sampler, which can draw by (seed, position, token) but offers it only together with batch-invariant kernels
that no CPU and not every attention backend has. Out: the same draw without them. Must never import anything of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UNSEEDED = 42  # SGLang's own value for a request without a seed
_LOW = 0xFFFFFFFF


def install_seeded_sampling() -> None:
    """Give every batch its requests' seeds, and the CPU the hash that SGLang has only in a compiled kernel."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__
    on_device = sampler.murmur_hash32

    def from_schedule_batch(cls: type, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
            filled = [UNSEEDED if seed is None else seed for seed in seeds]
            info.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(batch.device, non_blocking=True)
        return info

    def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
        if seed.device.type == "cpu":
            return murmur_hash32_cpu(seed, positions, col_indices)
        hashed: Tensor = on_device(seed, positions, col_indices)
        return hashed

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    sampler.murmur_hash32 = murmur_hash32


# N requests, V vocabulary
def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit, key seed 0) of the 16 bytes (low half of seed, high half, position, token).

    seed: [N] 64-bit integers; positions: [N]; col_indices: [V]. Returns [N V] int64 in [0, 2**32), the same numbers as
    SGLang's Triton kernel (sglang/kernels/ops/sampling/murmur_hash.py).
    """
    bits = seed.to(torch.int64)
    state = torch.zeros_like(bits)
    for block in (bits & _LOW, (bits >> 32) & _LOW, positions.to(torch.int64) & _LOW):
        state = _mix(state, block)
    state = _mix(state[:, None], col_indices.to(torch.int64)[None, :] & _LOW)
    return _finish(state ^ 16)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = (block * 0xCC9E2D51) & _LOW
    block = (_rotate(block, 15) * 0x1B873593) & _LOW
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotate(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _LOW


def _finish(state: Tensor) -> Tensor:
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _LOW
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _LOW
    return state ^ (state >> 16)
