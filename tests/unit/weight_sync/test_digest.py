"""The digest sees every bit and every place, and only those."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.weight_sync import digest as digest_module
from rlmegatron.weight_sync.digest import digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CASE = st.tuples(st.sampled_from(DTYPES), st.integers(2, 50), st.integers(0, 1000))


def random_tensor(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    """Any bits at all, NaN included."""
    content = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(content).view(dtype)


@settings(deadline=None)
@given(CASE, st.data())
def test_any_single_bit_changes_it(case: tuple[torch.dtype, int, int], data: st.DataObject) -> None:
    tensor = random_tensor(*case)
    before = digest(tensor)
    bits = tensor.view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != before


@settings(deadline=None)
@given(CASE, st.data())
def test_any_swap_of_two_different_elements_changes_it(case: tuple[torch.dtype, int, int], data: st.DataObject) -> None:
    tensor = random_tensor(*case)
    bits = tensor.view(BITS[tensor.itemsize])
    i, j = (data.draw(st.integers(0, len(bits) - 1)) for _ in range(2))
    before, same = digest(tensor), bool(bits[i] == bits[j])
    bits[[i, j]] = bits[[j, i]]
    assert (digest(tensor) == before) is same


@settings(deadline=None)
@given(CASE)
def test_equal_bits_have_one_digest(case: tuple[torch.dtype, int, int]) -> None:
    """Whatever the shape and the strides; as a signed 64-bit number."""
    tensor = random_tensor(*case)
    spread = torch.zeros(2 * len(tensor), dtype=tensor.dtype)[::2]
    spread.copy_(tensor)
    found = digest(tensor)
    assert found == digest(tensor.clone()) == digest(spread) == digest(tensor.view(1, -1, 1))
    assert -(2**63) <= found < 2**63


def test_it_is_the_sum_that_is_documented() -> None:
    """By Python's own integers: bits * (position * odd | 1), positions from 1, modulo 2^64, signed."""
    tensor = torch.tensor([1.5, -2.0, 0.0, 3e38])
    odd = -7046029254386353131
    total = sum(int(bits) * (place * odd | 1) for place, bits in enumerate(tensor.view(torch.int32).tolist(), start=1))
    assert digest(tensor) == (total + 2**63) % 2**64 - 2**63


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = digest(tensor)
    monkeypatch.setattr(digest_module, "_CHUNK", 7)
    assert digest(tensor) == whole


def test_negative_zero_is_not_zero() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
