"""What one rank says when it fails, and what it leaves for torchrun."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rlmegatron.distributed.failure import FAILED, INTERRUPTED, exit_code_of_failure
from rlmegatron.distributed.launcher import leave_note
from rlmegatron.distributed.world import RankFailure, World


@pytest.fixture
def alone() -> World:
    """Rank 0 of a world without a process group, which then has the say."""
    return World(rank=0, size=1, local_rank=0, ranks_per_node=1, device=torch.device("cpu"), control=None)  # type: ignore[arg-type]


def reported(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err.replace("=" * 100, "").strip()


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_failure_of_all_ranks_is_printed_as_it_is(alone: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of_failure(alone, RankFailure("reward failed on rank 3: no")) == FAILED
    assert reported(capfd) == "reward failed on rank 3: no"


def test_other_ranks_leave_it_to_rank_0(alone: World, capfd: pytest.CaptureFixture[str]) -> None:
    other = dataclasses.replace(alone, rank=1)
    assert exit_code_of_failure(other, RankFailure("reward failed on rank 3: no")) == FAILED
    assert reported(capfd) == ""


def test_a_users_mistake_on_one_rank_needs_no_traceback(alone: World, capfd: pytest.CaptureFixture[str]) -> None:
    exit_code_of_failure(alone, raised(ValueError("model.safetensors: it is cut")))
    assert reported(capfd) == "rank 0 failed: model.safetensors: it is cut"


def test_a_defect_on_one_rank_keeps_its_traceback(alone: World, capfd: pytest.CaptureFixture[str]) -> None:
    exit_code_of_failure(alone, raised(KeyError("lost")))
    text = reported(capfd)
    assert text.startswith("rank 0 failed: KeyError: 'lost'\n\nTraceback")
    assert "in raised" in text


def test_a_rank_whose_partner_is_gone_does_not_blame_itself(alone: World, capfd: pytest.CaptureFixture[str]) -> None:
    exit_code_of_failure(alone, raised(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:40123")))
    text = reported(capfd)
    assert text.startswith("rank 0 lost another rank, which ended without a report: killed, out of memory, or crashed.")
    assert "Rank 0 noticed in raised (" in text
    assert "Traceback" not in text


def test_an_interrupt_is_not_a_failure(alone: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of_failure(alone, KeyboardInterrupt()) == INTERRUPTED
    assert reported(capfd) == "interrupted; the run goes on from its newest checkpoint when it is started again"


def test_torchrun_reads_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    leave_note("see the report above")
    failure = ProcessFailure(local_rank=0, pid=os.getpid(), exitcode=1, error_file=str(path))
    assert failure.message["message"] == "see the report above"  # type: ignore[index]
    assert failure.timestamp > 0


def test_without_torchrun_there_is_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    leave_note("see the report above")
    assert list(tmp_path.iterdir()) == []
