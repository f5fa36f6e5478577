"""Whole tensors from a model of one process, in buckets; `tests/multiprocess` has sharded models."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", [1, 700, 5000, 1 << 20])
def test_buckets_hold_every_tensor_once_in_order(
    make_architecture: Any, make_tensors: Any, make_stream: Any, limit: int, tied: bool
) -> None:
    """A bucket exceeds its limit only when it is one parameter; the tied head is not sent a second time."""
    arch = make_architecture(tie_word_embeddings=tied)
    tensors = make_tensors(arch)
    stream = make_stream(arch, tensors)
    buckets = list(stream.buckets(bytes_per_bucket=limit, dtype=torch.float32, receive=True))
    names = [name for bucket in buckets for name, _ in bucket]
    assert names == [name for name, _ in stream.names_and_shapes()]
    assert sorted(names) == sorted(tensors)
    assert ("lm_head.weight" in names) is not tied
    assert all(torch.equal(tensor, tensors[name]) for bucket in buckets for name, tensor in bucket)
    num_rules = sum(not rule.copy for rule in arch.parameter_rules(1))
    assert len(buckets) == {1: num_rules, 1 << 20: 1}.get(limit, len(buckets))
    together = {
        parts: sum(tensors[part.name].nbytes for part in rule.parts)
        for rule in arch.parameter_rules(1)
        for parts in [tuple(part.name for part in rule.parts)]
    }
    for bucket in buckets:
        alone = tuple(name for name, _ in bucket) in together
        # The embedding's parameter is 16 rows long and its tensor 13, so the tensors may be smaller than the buffer.
        assert alone or sum(tensor.nbytes for _, tensor in bucket) <= limit
