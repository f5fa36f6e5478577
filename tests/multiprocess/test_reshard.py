"""Engines hold, bit for bit, what whole tensors leave in them, in every layout, and no rank receives a byte too many.

Workers are those of stand-in engines, with the parameters that SGLang has. What this does not prove: that SGLang hands
its workers orders as the stand-in does (see e2e), nor anything about CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from resharding import BUCKET, Job, Setup, unlike, worker_server
from worker_loaders import flip_last_bit

from rlmegatron.distributed.world import start_world
from rlmegatron.rollout.api import RolloutEngine
from rlmegatron.weight_sync import reshard as reshard_module
from rlmegatron.weight_sync.reshard import Name, Reshard

LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3 = (
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "DeepseekV2", "DeepseekV3")
)
TRANSPORTS: tuple[Name, ...] = ("peer", "collective")
MOST_PADDING = 15
"""Bytes beside what one rank gives another in a bucket."""
TIED = {"tie_word_embeddings": True}
FP32: dict[str, Any] = {"engine_dtype": torch.float32}
BF16: dict[str, Any] = {"train_dtype": torch.bfloat16}
UNEVEN = {"changes": {"intermediate_size": 80}}  # which SGLang pads to 128 for four ranks: 32, 32, 16 and none
ON_GPU = {"on_cpu": False}  # where SGLang replicates KV heads instead of padding them
LAYOUTS: list[tuple[str, int, dict[str, Any], tuple[str, ...]]] = [
    ("tp8->tp2", 8, {}, (LLAMA, DEEPSEEK_V3)),
    ("tp4->tp1", 4, FP32, (QWEN2, DEEPSEEK_V2)),
    ("tp2->tp4", 4, UNEVEN, (MISTRAL, MIXTRAL, DEEPSEEK_V2)),
    ("tp2->tp4", 4, ON_GPU, (QWEN3, QWEN3_MOE, DEEPSEEK_V3)),
    ("tp2pp2->tp2", 4, {**BF16, "changes": TIED}, (QWEN3, QWEN3_MOE, DEEPSEEK_V2)),
    ("tp2pp2vpp2->tp1", 4, {"changes": {**TIED, "num_hidden_layers": 4}}, (LLAMA, MIXTRAL, DEEPSEEK_V3)),
    ("ep4->tp2", 4, {}, (QWEN3_MOE, DEEPSEEK_V3)),
    ("tp2ep2->tp2ep2", 2, BF16, (QWEN3_MOE, DEEPSEEK_V2)),
    ("tp2ep2etp2->tp2ep2", 4, FP32, (MIXTRAL, DEEPSEEK_V3)),
    ("tp2->tp1", 4, BF16, (MISTRAL, QWEN2)),
    ("tp2->tp2", 4, ON_GPU, (LLAMA, QWEN3)),
]
"""Layout, ranks, what else is set, and the families that meet it here; all of them do so in SGLang's own classes, in
`test_reshard_in_sglang.py`."""


def published_wrongly(setups: list[Setup], workers: str) -> list[str]:
    """On this rank: what differs after a first publish and after one of weights that have changed in place."""
    world, found = start_world(timeout_s=60), []
    for setup in setups:
        with Job(setup, world, workers) as job:
            found += [f"{setup.family} {problem}" for problem in problems(job)]
    return found


def problems(job: Job) -> Iterator[str]:
    job.train(seed=1)
    job.publish(job.hf_stream())
    streamed, wanted = job.held(), job.bytes_to_receive()
    yield from labelled("of hf_stream", unlike(streamed, job.expected(seed=1)))
    for name in TRANSPORTS:
        job.train(seed=1)
        job.spoil()
        reshard = job.reshard(name)
        job.publish(reshard)
        yield from labelled(f"of {name}", unlike(job.held(), streamed))
        padding = MOST_PADDING * reshard.num_messages * job.world.size if name == "collective" else 0
        if reshard.bytes_received > wanted + padding:
            yield f"{reshard.bytes_received} bytes came by {name}, {wanted} are needed"
        job.train(seed=2)
        job.publish(reshard)
        yield from labelled(f"of changed weights by {name}", unlike(job.held(), job.expected(seed=2)))


def labelled(label: str, names: list[str]) -> list[str]:
    return [f"{label}: {name}" for name in names]


def assert_published(layout: str, num_ranks: int, settings: dict[str, Any], families: tuple[str, ...]) -> None:
    setups = [Setup(family, layout, **settings) for family in families]
    of_ranks = run_ranks(published_wrongly, num_ranks, setups, worker_server().address)
    assert of_ranks == [[]] * num_ranks


@pytest.mark.parametrize(
    ("layout", "num_ranks", "settings", "families"),
    LAYOUTS,
    ids=[f"{layout}-{'gpu' if settings == ON_GPU else 'cpu'}" for layout, _, settings, _ in LAYOUTS],
)
def test_engines_hold_what_hf_stream_leaves_whatever_the_layout(
    layout: str, num_ranks: int, settings: dict[str, Any], families: tuple[str, ...]
) -> None:
    """Which is also what a loader that is written as plain loops makes of whole tensors, padding included."""
    assert_published(layout, num_ranks, settings, families)


EVEN = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 512,
}
CUT = 2 * (2 * 512 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96))
"""Bytes in bf16 of everything in a Llama of these sizes but its norms, which every rank holds."""


def counted(layout: str, workers: str) -> dict[str, tuple[int, int, int]]:
    """Transport -> (bytes received, bytes of buckets, bytes by the slow count), and nothing may differ."""
    setup, found = Setup(LLAMA, layout, on_cpu=False, changes=EVEN), {}
    with Job(setup, start_world(timeout_s=60), workers) as job:
        for name in TRANSPORTS:
            job.train(seed=1)
            job.spoil()
            reshard = job.reshard(name)
            job.publish(reshard)
            assert not unlike(job.held(), job.expected(seed=1))
            found[name] = (reshard.bytes_received, reshard.bucket_bytes, job.bytes_to_receive())
    return found


@pytest.mark.parametrize(("layout", "num_ranks", "num_engine"), [("tp8->tp2", 8, 2), ("tp4->tp1", 4, 1)])
def test_a_rank_receives_the_bound_exactly_and_keeps_two_buckets_or_none(
    layout: str, num_ranks: int, num_engine: int
) -> None:
    """By hand: of what training cuts, a rank of the engine has 1/num_engine and was trained with 1/num_ranks."""
    bound = CUT // num_engine - CUT // num_ranks
    for found in run_ranks(counted, num_ranks, layout, worker_server().address):
        assert found["peer"] == (bound, 0, bound)
        received, buckets, wanted = found["collective"]
        assert received == wanted == bound
        assert 0 < buckets <= 2 * BUCKET


def through_buckets(sizes: list[int], workers: str) -> list[tuple[int, int, list[str]]]:
    """For each size of buckets (messages, bytes of buckets, what differs)."""
    found = []
    with Job(Setup(DEEPSEEK_V3, "tp4->tp2", train_dtype=torch.bfloat16), start_world(timeout_s=60), workers) as job:
        for number, size in enumerate(sizes):
            job.train(seed=number)
            job.spoil()
            reshard = job.reshard("collective", bytes_per_bucket=size)
            job.publish(reshard)
            found.append((reshard.num_messages, reshard.bucket_bytes, unlike(job.held(), job.expected(seed=number))))
    return found


def test_weights_arrive_through_buckets_of_any_size() -> None:
    """From slots of 256 bytes, the least that there are, to one bucket for everything."""
    for smallest, small, largest in run_ranks(through_buckets, 4, [1, 4096, 1 << 24], worker_server().address):
        assert [wrong for *_, wrong in (smallest, small, largest)] == [[], [], []]
        assert smallest[0] > 50 > small[0] > 5 and largest[0] == 1
        assert smallest[1] <= 2 * 4 * 256 and small[1] <= 2 * 4096


def across_nodes(setup: Setup, workers: str) -> tuple[int, int, list[str]]:
    """(bytes of buckets, bytes that came beside those that are needed, what differs) of peer."""
    with Job(setup, start_world(timeout_s=60), workers) as job:
        reshard = job.reshard("peer")
        for seed in (1, 2):
            job.train(seed=seed)
            job.publish(reshard)
        surplus = reshard.bytes_received - job.bytes_to_receive()
        return reshard.bucket_bytes, surplus, unlike(job.held(), job.expected(seed=2))


@pytest.mark.parametrize(
    ("layout", "num_ranks", "ranks_per_node", "in_buckets"),
    [
        ("tp4->tp2", 4, 2, [0, 1, 2, 3]),
        ("tp2->tp1", 4, 2, []),
        ("tp2->tp1", 6, 5, [0, 1, 4, 5]),
    ],
    ids=["all-span-nodes", "none-spans-nodes", "one-of-two-spans-nodes"],
)
def test_peer_takes_buckets_for_the_groups_that_span_nodes_alone(
    layout: str, num_ranks: int, ranks_per_node: int, in_buckets: list[int]
) -> None:
    """In the last case rank 5 is alone on its node: what its engine lacks, rank 4 gives, which itself asks rank 1."""
    setup = Setup(QWEN3, layout, ranks_per_node=ranks_per_node)
    found = run_ranks(across_nodes, num_ranks, setup, worker_server().address)
    assert [wrong for *_, wrong in found] == [[]] * num_ranks
    assert [rank for rank, (buckets, *_) in enumerate(found) if buckets] == in_buckets
    assert all(surplus <= (MOST_PADDING * 6 if buckets else 0) for buckets, surplus, _ in found)


def move_parameters(job: Job) -> None:
    """Other memory for those of one rank alone."""
    if job.world.rank == 1:
        for parameter in job.shard.parameters.values():
            parameter.data = parameter.clone()


def restart_an_engine(job: Job) -> None:
    if job.world.rank == 1:
        job.restart_engine()


def after_an_event(name: Name, event: Callable[[Job], None], workers: str) -> list[str]:
    """What differs when something has happened between two publishes."""
    with Job(Setup(QWEN3, "tp2->tp1"), start_world(timeout_s=60), workers) as job:
        reshard = job.reshard(name)
        job.train(seed=1)
        job.publish(reshard)
        event(job)
        job.train(seed=2)
        job.publish(reshard)
        return unlike(job.held(), job.expected(seed=2))


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("event", [move_parameters, restart_an_engine])
def test_a_publish_is_right_after_one_side_s_memory_became_another(name: Name, event: Callable[[Job], None]) -> None:
    assert run_ranks(after_an_event, 2, name, event, worker_server().address) == [[], []]


def with_kept_plans(directory: Path, workers: str) -> list[str]:
    """What differs after a publish by a plan that another process left."""
    world = start_world(timeout_s=60)
    with Job(Setup(MIXTRAL, "tp2ep2->tp2"), world, workers) as job:
        job.train(seed=1)
        job.publish(job.reshard("peer", plans=directory))
        job.spoil()
        with patch.object(reshard_module, "plan_pieces", side_effect=AssertionError("the plan was there")):
            job.publish(job.reshard("peer", plans=directory))
        return unlike(job.held(), job.expected(seed=1))


def test_a_plan_on_disk_is_not_computed_again(tmp_path: Path) -> None:
    assert run_ranks(with_kept_plans, 2, tmp_path, worker_server().address) == [[], []]
    assert len(list(tmp_path.iterdir())) == 2  # of the engine's two ranks


class Spoiling:
    """The transport, after which one bit of one rank of one engine is another."""

    name = "peer"

    def __init__(self, job: Job, transport: Reshard, parameter: str | None, *, on: int) -> None:
        self._job, self._transport, self._parameter, self._on = job, transport, parameter, on

    def transfer(self, engine: RolloutEngine | None) -> None:
        self._transport.transfer(engine)
        if engine is not None and self._job.world.rank == 1:  # the lead of the second engine
            names = [self._parameter if rank == self._on else None for rank in range(engine.tensor)]
            self._job.in_workers_of_open_update(flip_last_bit, names)


def verified(parameter: str, workers: str) -> list[tuple[str, bool, int | None] | str]:
    """(error, whether the engine serves, its version) after a good, a spoiled and again a good publish."""
    found = []
    with Job(Setup(DEEPSEEK_V3, "tp4->tp2"), start_world(timeout_s=60), workers) as job:
        reshard = job.reshard("peer")
        job.train(seed=1)
        for transport in (reshard, Spoiling(job, reshard, parameter, on=1), reshard):
            error = job.refusal(transport, verifies=True)
            found.append((error, *((job.engine.is_serving, job.engine.version) if job.engine else ())))
    return found


@pytest.mark.parametrize(
    ("parameter", "tensor"),
    [
        ("model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight", "model.layers.0.self_attn.q_a_proj.weight"),
        ("model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight"),
    ],
)
def test_a_bit_that_differs_is_an_error_that_names_the_tensor(parameter: str, tensor: str) -> None:
    """Four ranks with two engines, led by ranks 0 and 1; the second one's rank 1 is spoiled."""
    good = ("", True, 1), ("", True, 1), ("",), ("",)
    found = run_ranks(verified, 4, parameter, worker_server().address)
    assert tuple(first for first, *_ in found) == good
    errors = {error for _, (error, *_), _ in found}
    assert len(errors) == 1
    error = errors.pop()
    assert error.startswith("publish (verify) failed on rank 1: ") and f"; the first is {tensor} (" in error, error
    assert [refused[1:] for _, refused, _ in found] == [(False, 1), (False, 1), (), ()]
    assert [again for *_, again in found] == [("", True, 3), ("", True, 3), ("",), ("",)]
