"""What an engine's process finds in its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlmegatron.rollout.server import child_environment

ROOT = str(Path(__file__).parents[3])


def test_an_engine_inherits_all_but_what_torchrun_tells_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ROLE_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OF_THE_USER", "kept")
    monkeypatch.setenv("OVERRIDDEN", "inherited")
    monkeypatch.setenv("PYTHONPATH", f"mine{os.pathsep}")
    found = child_environment({"OVERRIDDEN": "given"}, ["first", "second"])
    assert not found.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ROLE_RANK"}
    assert (found["OF_THE_USER"], found["OVERRIDDEN"]) == ("kept", "given")
    assert found["PYTHONPATH"].split(os.pathsep) == ["first", "second", ROOT, "mine"]
