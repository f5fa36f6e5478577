"""Whole tensors from a replica whose ranks are threads; `tests/multiprocess` has real ranks and models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, random_tensors, tiny_architecture
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.replica import ReplicaLayout, stage_lookup
from rlmegatron.models.rules import stages
from rlmegatron.models.safetensors_writer import TensorSpec
from rlmegatron.models.stream import TensorStream

Buckets = list[list[tuple[str, Tensor]]]
LAYOUTS = [
    ReplicaLayout(tp=1, pp=1),
    ReplicaLayout(tp=4, pp=1, ep=2),
    ReplicaLayout(tp=1, pp=2, ep=4),
    ReplicaLayout(tp=2, pp=2, ep=2, etp=2),
    ReplicaLayout(tp=4, pp=1, ep=2, etp=4),
]


class Ranks:
    """The group of one replica: gathers between threads, and notes how large each gather was."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.gathered: list[int] = []
        self.meeting = threading.Barrier(size, timeout=20)


class Member:
    """What one rank takes for its process group."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self._rank = ranks, rank

    def rank(self) -> int:
        return self._rank


def all_gather(found: list[Tensor], given: Tensor, group: Member) -> None:
    ranks = group.ranks
    ranks.given[group.rank()] = given
    if group.rank() == 0:
        ranks.gathered.append(len(found) * given.nbytes)
    ranks.meeting.wait()
    for target, source in zip(found, ranks.given, strict=True):
        target.copy_(source)
    ranks.meeting.wait()


@pytest.fixture(autouse=True)
def gather_between_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody fills is NaN, which equals nothing."""
    monkeypatch.setattr("rlmegatron.models.stream.dist.all_gather", all_gather)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: torch.full(shape, torch.nan, dtype=self.dtype))
    yield


def streams(arch: Architecture, tensors: dict[str, Tensor], layout: ReplicaLayout, ranks: Ranks) -> list[TensorStream]:
    """One stream for each rank, which holds its own shards and nothing else."""
    rules, stage_of = arch.parameter_rules(layout.tp), stage_lookup(stages(num_layers=arch.num_layers, pp=layout.pp))
    num_experts = arch.experts.num if arch.experts else 0
    found = []
    for rank, place in enumerate(layout.places()):
        shards = {}
        for rule in rules:
            is_mine = rule.expert is None or rule.expert * layout.ep // num_experts == place.ep_rank
            if stage_of(rule) == place.pp_rank and is_mine:
                size, axis_rank = layout.cut(rule, place)
                shards[rule.parameter] = torch.zeros(rule.local_shape(size))
                for piece in rule.pieces(size=size, rank=axis_rank):
                    shards[rule.parameter][slices(piece.target)] = tensors[piece.name][slices(piece.source)]
        group: Any = Member(ranks, rank)
        found.append(TensorStream(rules, shards, stage_of, layout, group, num_experts))
    return found


def gathered(
    arch: Architecture, tensors: dict[str, Tensor], layout: ReplicaLayout, *, limit: int, dtype: torch.dtype
) -> tuple[list[Buckets], list[int]]:
    """The buckets of every rank, the last of several receiving nothing, and the bytes of each gather."""
    size = len(layout.places())
    ranks = Ranks(size)
    members = streams(arch, tensors, layout, ranks)

    def run(rank: int) -> Buckets:
        receive = rank == 0 or rank < size - 1
        return list(members[rank].buckets(bytes_per_bucket=limit, dtype=dtype, receive=receive))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), ranks.gathered


def flattened(buckets: Buckets) -> list[tuple[str, Tensor]]:
    return [pair for bucket in buckets for pair in bucket]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_tensor_comes_once_and_whole(family: str, layout: ReplicaLayout) -> None:
    arch = tiny_architecture(family)
    tensors = random_tensors(arch)
    of_ranks, _ = gathered(arch, tensors, layout, limit=4000, dtype=torch.float32)
    receiving = of_ranks[:-1] if len(of_ranks) > 1 else of_ranks
    for buckets in receiving:
        found = flattened(buckets)
        assert sorted(name for name, _ in found) == sorted(tensors)
        assert [name for name, tensor in found if not torch.equal(tensor, tensors[name])] == []
    if len(of_ranks) > 1:
        assert of_ranks[-1] == [[]] * len(of_ranks[0])


@pytest.mark.parametrize("limit", [1, 700, 5000, 1 << 20])
@pytest.mark.parametrize("layout", [ReplicaLayout(tp=2, pp=1), ReplicaLayout(tp=2, pp=2, ep=2)], ids=str)
def test_a_gather_exceeds_the_limit_only_for_one_parameter(layout: ReplicaLayout, limit: int) -> None:
    arch = tiny_architecture("Qwen3MoeForCausalLM")
    of_ranks, sizes = gathered(arch, random_tensors(arch), layout, limit=limit, dtype=torch.float32)
    assert len(sizes) == len(of_ranks[0])
    num_parts = {part.name: len(rule.parts) for rule in arch.parameter_rules(1) for part in rule.parts}
    for bucket, size in zip(of_ranks[0], sizes, strict=True):
        assert size <= limit or len(bucket) == num_parts[bucket[0][0]]
    num_rules = sum(not rule.copy for rule in arch.parameter_rules(1))
    assert len(sizes) == {1: num_rules, 1 << 20: 1}.get(limit, len(sizes))
    assert limit != 5000 or 1 < len(sizes) < num_rules


def test_experts_of_different_ranks_are_gathered_together() -> None:
    """8 experts over 4 ranks: a gather that carries one expert a rank carries no filling for the others."""
    arch = tiny_architecture("MixtralForCausalLM", num_hidden_layers=1, intermediate_size=64)
    layout, expert = ReplicaLayout(tp=1, pp=1, ep=4), 3 * 64 * 8 * 4
    of_ranks, sizes = gathered(arch, random_tensors(arch), layout, limit=4 * expert, dtype=torch.float32)
    experts = [[name for name, _ in bucket if ".experts." in name] for bucket in of_ranks[0]]
    full = [size for names, size in zip(experts, sizes, strict=True) if len(names) >= 12]
    assert full and all(size == 4 * expert for size in full)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_not_sent(tied: bool) -> None:
    arch = tiny_architecture("Qwen3ForCausalLM", tie_word_embeddings=tied)
    of_ranks, _ = gathered(arch, random_tensors(arch), ReplicaLayout(tp=2, pp=2), limit=1 << 20, dtype=torch.float32)
    assert ("lm_head.weight" in dict(flattened(of_ranks[0]))) is not tied


@pytest.mark.parametrize("layout", [ReplicaLayout(tp=1, pp=1), ReplicaLayout(tp=2, pp=1, ep=2)], ids=str)
def test_the_bias_of_the_choice_stays_fp32(layout: ReplicaLayout) -> None:
    arch = tiny_architecture("DeepseekV3ForCausalLM")
    tensors = random_tensors(arch)
    of_ranks, _ = gathered(arch, tensors, layout, limit=2000, dtype=torch.bfloat16)
    found = dict(flattened(of_ranks[0]))
    for name, tensor in found.items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, tensors[name] if kept else tensors[name].bfloat16()), name
    stream = streams(arch, tensors, layout, Ranks(1))[0]
    listed = [TensorSpec(name, tuple(tensors[name].shape), tensor.dtype) for name, tensor in found.items()]
    assert sorted(stream.tensors(torch.bfloat16), key=str) == sorted(listed, key=str)
