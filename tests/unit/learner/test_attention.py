"""Packed attention against a loop over sequences, and RMSNorm against Hugging Face's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmegatron.learner.attention import PackedAttention, RMSNorm, length_buckets

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend_in_a_loop(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """One query at a time, over the keys of its own sequence up to itself."""
    rows, start = [], 0
    for length in lengths:
        for place in range(start, start + length):
            heads = []
            for head in range(query.shape[1]):
                group = head * key.shape[1] // query.shape[1]
                scores = key[start : place + 1, group] @ query[place, head] * scale
                heads.append(scores.softmax(0) @ value[start : place + 1, group])
            rows.append(torch.cat(heads))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 7, 4], [0, 6, 0, 2, 0], [1, 30, 2, 29, 1], [2] * 9], ids=str)
@pytest.mark.parametrize("chunk", [1, 16, 4096])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_stays_within_each_sequence(lengths: list[int], chunk: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator).double().requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    attention = PackedAttention(None, attention_chunk=chunk, softmax_scale=0.3)  # type: ignore[arg-type]
    found = attention(query, key, value, packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds(lengths)))
    wanted = attend_in_a_loop(query, key, value, lengths, 0.3)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(wanted.shape, generator=generator).double()
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), (query, key, value)),
        torch.autograd.grad((wanted * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 100))
def test_buckets_hold_every_token_once_and_little_padding(lengths: list[int], chunk: int) -> None:
    """Lengths in a bucket differ by at most a factor of 2, and only a single sequence may exceed the chunk."""
    buckets = length_buckets(bounds(lengths), chunk)
    real = [row for rows, keep in buckets for row in rows[keep].tolist()]
    assert sorted(real) == list(range(sum(lengths)))
    for rows, keep in buckets:
        inside = keep.sum(1)
        assert len(rows) == 1 or rows.numel() <= chunk
        assert int(inside.max()) <= 2 * int(inside.min())
        assert bool((keep.int().diff(dim=1) <= 0).all()), "padding is on the right"
        for row, kept in zip(rows, keep, strict=True):
            assert bool((row[kept].diff() == 1).all()), "a row is one sequence in order"


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_rms_norm_equals_hugging_face(eps: float, dtype: torch.dtype, tolerance: float) -> None:
    """In bf16 up to one unit in the last place: Hugging Face rounds before it multiplies by the weight."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(0)
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=True)
    ours, theirs = RMSNorm(config, 24, eps=eps), Qwen3RMSNorm(24, eps=eps).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(24))
        theirs.weight.copy_(ours.weight)
    hidden = torch.randn(5, 3, 24, dtype=dtype) * 0.1
    torch.testing.assert_close(ours(hidden), theirs(hidden), rtol=tolerance, atol=tolerance)
    assert ours.weight.sequence_parallel is True
