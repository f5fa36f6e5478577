"""What an engine's process is told of devices, where there are some: the server is a stand-in that starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.platform.sglang_cpu import EngineFindings
from rlmegatron.rollout import sglang_engine
from rlmegatron.rollout.sglang_engine import EngineSpec, SGLangEngine


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What servers are started with, on a machine with four devices."""
    orders: list[dict[str, Any]] = []
    found = EngineFindings(cuda=True, sgl_kernel=True, torchvision=True)
    monkeypatch.setattr(sglang_engine, "find_engine_needs", lambda: found)
    monkeypatch.setattr(sglang_engine, "EngineServer", lambda **order: orders.append(order))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return orders


def start(directory: Path, *, tensor: int, **spec: Any) -> None:
    (directory / "config.json").write_text("{}")
    SGLangEngine(
        EngineSpec(
            model_path=str(directory), dtype="bf16", context_length=8, log_path=directory / "log", seed=0, **spec
        ),
        RolloutConfig(tensor=tensor),
    )


def test_devices_are_renumbered_so_that_engine_rank_j_runs_on_device_j(
    tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, tensor=2, devices=(1, 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    start(tmp_path, tensor=4, devices=(0, 2, 1, 3))
    start(tmp_path, tensor=1)
    assert [order["environment"]["CUDA_VISIBLE_DEVICES"] for order in started] == ["1,3,0,2", "4,6,5,7", "4,5,6,7"]
    assert not any(order["server_args"].keys() & {"base_gpu_id", "gpu_id_step"} for order in started)


def test_an_engine_without_a_device_for_each_rank_is_refused(tmp_path: Path, started: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="2 devices for an engine of 4 ranks"):
        start(tmp_path, tensor=4, devices=(0, 1))
    with pytest.raises(ValueError, match="needs device 4, but this process sees 4"):
        start(tmp_path, tensor=8)
    assert not started
