"""The seeded draw's hash against MurmurHash3 written out byte by byte, and its published test values."""

import struct

import torch

from rlmegatron.rollout.seeded_sampling import murmur_hash32_cpu


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 (Appleby, SMHasher) for inputs of whole 4-byte blocks."""
    low = 0xFFFFFFFF
    state = seed
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 & low
        block = (block << 15 | block >> 17) & low
        state ^= block * 0x1B873593 & low
        state = (state << 13 | state >> 19) & low
        state = (state * 5 + 0xE6546B64) & low
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & low
    return state ^ state >> 16


def test_the_reference_gives_the_published_values() -> None:
    assert murmur3_32(b"") == 0
    assert murmur3_32(b"", seed=1) == 0x514E28B7
    assert murmur3_32(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3_32(b"\x21\x43\x65\x87") == 0xF55B516B


def test_the_hash_is_murmur3_of_seed_position_and_token() -> None:
    seeds = [0, 1, 42, 2**32 + 7, 2**63 - 1, 123456789012345678]
    positions = [0, 1, 5, 1000, 2**31 - 1, 77]
    hashed = murmur_hash32_cpu(torch.tensor(seeds), torch.tensor(positions), torch.arange(50))
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in range(50):
            expected = murmur3_32(struct.pack("<QII", seed, position, token))
            assert hashed[i, token].item() == expected, (seed, position, token)


def test_seeds_are_read_as_unsigned() -> None:
    signed = torch.tensor([-1], dtype=torch.int64)
    hashed = murmur_hash32_cpu(signed.to(torch.uint64), torch.tensor([3]), torch.arange(1))
    assert hashed.item() == murmur3_32(struct.pack("<QII", 2**64 - 1, 3, 0))
