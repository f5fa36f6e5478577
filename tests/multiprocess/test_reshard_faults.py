"""Whatever breaks in a publish is one error on every rank, serves nobody, leaves nothing, and is over with the next.

Four ranks: training TP 4, two engines of two workers each, led by ranks 0 and 1, whose second workers run beside ranks
2 and 3. What this does not prove: that SGLang itself survives or reports such faults.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ranks import run_ranks
from resharding import Job, Setup, unlike, worker_server
from worker_loaders import die_at, fail_at, set_parameters

from rlmegatron.distributed.world import start_world
from rlmegatron.weight_sync import buckets
from rlmegatron.weight_sync.buckets import BucketGroup
from rlmegatron.weight_sync.reshard import Name
from rlmegatron.weight_sync.shared_memory import Handle
from rlmegatron.weight_sync.shared_parameters import SharedParameters

SETUP = Setup("Qwen3ForCausalLM", "tp4->tp2", changes={"intermediate_size": 128})
SHARED_MEMORY = Path("/dev/shm")
SMALL_BUCKET = 4096  # a dozen of them
LONGEST_S = 30  # less than anybody waits for anybody
Fault = Callable[[Job, Path], Any]
"""A context in which a publish fails; it is given a directory of plans."""


@contextmanager
def worker_killed(job: Job, _plans: Path) -> Iterator[None]:
    """When it is about to copy from the ranks' memory."""
    with _killed(job, "copy_segments", 1):
        yield


@contextmanager
def worker_killed_before_its_call(job: Job, _plans: Path) -> Iterator[None]:
    """The rank beside it waits for a call that never comes."""
    with _killed(job, "call", 1):
        yield


@contextmanager
def worker_killed_between_buckets(job: Job, _plans: Path) -> Iterator[None]:
    """After what it takes from its own rank's memory and one bucket."""
    with _killed(job, "copy_segments", 3):
        yield


@contextmanager
def _killed(job: Job, function: str, number: int) -> Iterator[None]:
    """The second worker of the first engine."""
    if job.world.rank == 0:
        job.in_workers(die_at, [None, (function, number)])
    yield
    if job.engine is not None and not job.engine.alive():
        job.restart_engine()


@contextmanager
def worker_fails(job: Job, _plans: Path) -> Iterator[None]:
    if job.world.rank == 0:
        job.in_workers(fail_at, [None, ("copy_segments", 1)])
    yield


@contextmanager
def rank_fails_to_share(job: Job, _plans: Path) -> Iterator[None]:
    _let_everybody_connect(job)
    with _on_rank_2(job, SharedParameters, "handles", RuntimeError("sharing went wrong")):
        yield


@contextmanager
def rank_fails_to_share_buckets(job: Job, _plans: Path) -> Iterator[None]:
    _let_everybody_connect(job)
    with _on_rank_2(job, BucketGroup, "handles", RuntimeError("sharing went wrong")):
        yield


@contextmanager
def rank_fails_to_pack(job: Job, _plans: Path) -> Iterator[None]:
    """The third bucket; two have been on their way."""
    copy, number = buckets.copy_segments, 0

    def fail(*args: Any) -> None:
        nonlocal number
        number += 1
        if number == 3:
            raise RuntimeError("packing went wrong")
        copy(*args)

    with _on_rank_2(job, buckets, "copy_segments", fail):
        yield


@contextmanager
def memory_of_an_ended_process(job: Job, _plans: Path) -> Iterator[None]:
    ended = subprocess.Popen(["true"])
    ended.wait()
    _let_everybody_connect(job)
    with _with_other_handles(job, lambda handle: replace(handle, pid=ended.pid)):
        yield


@contextmanager
def memory_that_was_replaced(job: Job, _plans: Path) -> Iterator[None]:
    """The file behind the number is another one."""
    _let_everybody_connect(job)
    with _with_other_handles(job, lambda handle: replace(handle, inode=handle.inode + 1)):
        yield


def _with_other_handles(job: Job, change: Callable[[Handle], Handle]) -> Any:
    share = SharedParameters.handles

    def handles(shared: SharedParameters, numbers: Any = None) -> list[Handle]:
        return [change(handle) for handle in share(shared, numbers)]

    return _on_rank_2(job, SharedParameters, "handles", handles)


@contextmanager
def unknown_parameter(job: Job, _plans: Path) -> Iterator[None]:
    """In the first engine."""
    _let_everybody_connect(job)
    if job.world.rank == 0:
        job.in_workers(set_parameters, [{}, {"model.layers.0.extra.weight": [[3, 5], "bfloat16"]}])
    yield
    if job.world.rank == 0:
        job.in_workers(set_parameters, [{}, {"model.layers.0.extra.weight": None}])


@contextmanager
def plan_for_another_layout(job: Job, plans: Path) -> Iterator[None]:
    """One rank's plan lies under the other's name."""
    with _other_plan(job, plans, lambda one, other: shutil.copy(one, other)):
        yield


@contextmanager
def truncated_plan(job: Job, plans: Path) -> Iterator[None]:
    with _other_plan(job, plans, lambda _, other: other.write_bytes(other.read_bytes()[:1000])):
        yield


@contextmanager
def _other_plan(job: Job, plans: Path, change: Callable[[Path, Path], object]) -> Iterator[None]:
    _let_everybody_connect(job)
    if job.world.rank == 0:
        change(*sorted(plans.glob("*.npz")))
    job.world.barrier()
    yield
    if job.world.rank == 0:
        shutil.rmtree(plans)
    job.world.barrier()


def _let_everybody_connect(job: Job) -> None:
    """At the next publish, because the first engine has started anew."""
    if job.world.rank == 0:
        job.restart_engine()


@contextmanager
def _on_rank_2(job: Job, owner: Any, name: str, does: Any) -> Iterator[None]:
    """A rank that leads no engine. An exception is raised, a function called instead."""
    if job.world.rank != 2:
        yield
        return
    is_error = isinstance(does, Exception)
    with patch.object(owner, name, side_effect=does) if is_error else patch.object(owner, name, does):
        yield


@dataclass(frozen=True)
class Outcome:
    """On one rank. `before`, `after` and `again` say what its engine served: nothing, or a version."""

    before: int | None
    error: str
    after: int | None
    again: int | None
    unlike: list[str]
    seconds: float
    """That the failing one took."""
    pids: list[int]
    """Of the rank and of its engine's workers."""


def outcome(name: Name, fault: Fault, directory: Path, workers: str) -> Outcome:
    """A publish, one that fails, and one that mends all."""
    plans, scratch = directory / "plans", directory / "scratch"
    scratch.mkdir(exist_ok=True)
    tempfile.tempdir = str(scratch)
    with Job(SETUP, start_world(timeout_s=60), workers) as job:
        reshard = job.reshard(name, bytes_per_bucket=SMALL_BUCKET, plans=plans)
        job.train(seed=1)
        job.publish(reshard)
        before, pids = served(job), [os.getpid(), *worker_pids(job)]
        with fault(job, plans):
            job.train(seed=2)
            started = time.monotonic()
            error, after = job.refusal(reshard), served(job)
            seconds = time.monotonic() - started
        job.publish(reshard)
        again, pids = served(job), pids + worker_pids(job)
        return Outcome(before, error, after, again, unlike(job.held(), job.expected(seed=2)), seconds, pids)


def served(job: Job) -> int | None:
    return job.engine.version if job.engine is not None and job.engine.is_serving else None


def worker_pids(job: Job) -> list[int]:
    return job.engine.worker_pids if job.engine is not None else []


def assert_nothing_is_left(outcomes: list[Outcome], directory: Path) -> None:
    """No process, no shared memory of any, no file with orders; the system takes a moment to put away the first two."""
    pids = {pid for one in outcomes for pid in one.pids}
    assert len(pids) >= 4 + 4
    deadline = time.monotonic() + 20
    while (left := [*processes(pids), *shared_memory(pids)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not list((directory / "scratch").iterdir())


def processes(pids: set[int]) -> Iterator[Path]:
    return (path for pid in pids if (path := Path(f"/proc/{pid}")).exists())


def shared_memory(pids: set[int]) -> Iterator[Path]:
    """Names begin with torch and the process that made it."""
    return (path for pid in pids for path in SHARED_MEMORY.glob(f"torch_{pid}_*"))


FAULTS: list[tuple[Name, Fault, str, str]] = [
    ("peer", worker_killed, "publish (transfer) failed on rank 0", "rank 1 of the stand-in engine has ended"),
    ("peer", worker_fails, "publish (transfer) failed on rank 0", "rank 1: RuntimeError: the worker went wrong"),
    ("peer", rank_fails_to_share, "reshard (plan) failed on rank 2", "sharing went wrong"),
    ("peer", memory_of_an_ended_process, "publish (transfer) failed on rank 0", "is it alive?"),
    ("peer", memory_that_was_replaced, "publish (transfer) failed on rank 0", "has vanished"),
    ("peer", unknown_parameter, "reshard (plan) failed on rank 2", "no rule covers: model.layers.0.extra.weight"),
    ("peer", plan_for_another_layout, "reshard (plan) failed", "was made for another layout; remove the file"),
    ("peer", truncated_plan, "reshard (plan) failed", "not a whole plan"),
    ("collective", worker_killed_before_its_call, "failed on rank 0", "rank 1 of the stand-in engine has ended"),
    ("collective", worker_killed_between_buckets, "failed on rank 0", "rank 1 of the stand-in engine has ended"),
    ("collective", worker_fails, "failed on rank 0", "rank 1: RuntimeError: the worker went wrong"),
    ("collective", rank_fails_to_pack, "failed on rank 2", "packing went wrong"),
    ("collective", rank_fails_to_share_buckets, "reshard (buckets) failed on rank 2", "sharing went wrong"),
]
"""Transport, what happens, and where and how the one error says so."""


@pytest.mark.parametrize(
    ("name", "fault", "phase", "says"), FAULTS, ids=[f"{name}-{fault.__name__}" for name, fault, *_ in FAULTS]
)
def test_a_fault_is_one_error_everywhere_and_nobody_serves_until_the_next_publish(
    tmp_path: Path, name: Name, fault: Fault, phase: str, says: str
) -> None:
    found = run_ranks(outcome, 4, name, fault, tmp_path, worker_server().address)
    (error,) = {one.error for one in found}
    assert phase in error and says in error, error
    assert max(one.seconds for one in found) < LONGEST_S
    assert [one.before for one in found] == [1, 1, None, None]
    assert [one.after for one in found] == [None] * 4
    assert [one.again for one in found] == [3, 3, None, None]
    assert [one.unlike for one in found] == [[]] * 4
    assert_nothing_is_left(found, tmp_path)


def refused_engines(name: Name, changes: dict[str, Any], workers: str) -> tuple[str, int | None, int | None]:
    """(error, what is served then, what is served when the engine has the learner's model)."""
    other = replace(SETUP, changes={**SETUP.changes, **changes}).architecture()
    world = start_world(timeout_s=60)
    with Job(SETUP, world, workers, engine_arch=other) as job:
        job.train(seed=1)
        reshard = job.reshard(name)
        error, after = job.refusal(reshard), served(job)
        job.start_engine(workers, job.arch)
        job.publish(reshard)
        return error, after, served(job)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"intermediate_size": 64}, "mlp.gate_up_proj.weight of shape [64, 48] should be [128, 48]"),
        ({"num_hidden_layers": 1}, "the engine has no model.layers.1."),
        ({"num_hidden_layers": 3}, "parameters that no rule covers: model.layers.2."),
        ({"intermediate_size": 192}, "mlp.gate_up_proj.weight of shape [192, 48] should be [128, 48]"),
        ({"num_key_value_heads": 4}, "self_attn.qkv_proj.weight of shape [60, 48] should be [48, 48]"),
    ],
    ids=["narrower", "fewer-layers", "more-layers", "wider", "more-kv-heads"],
)
@pytest.mark.parametrize("name", ["peer", "collective"])
def test_an_engine_with_another_model_is_refused(name: Name, changes: dict[str, Any], says: str) -> None:
    """The learner's has an MLP of 128, 2 layers and 2 KV heads."""
    found = run_ranks(refused_engines, 4, name, changes, worker_server().address)
    (error,) = {error for error, *_ in found}
    assert "reshard (plan) failed on rank" in error and says in error, error
    assert [after for _, after, _ in found] == [None] * 4
    assert [again for *_, again in found] == [2, 2, None, None]
