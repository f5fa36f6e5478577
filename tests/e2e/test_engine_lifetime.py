"""How real SGLang engines start, die and end. Every test has its own engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_engine import (
    PROMPTS,
    SAMPLING,
    make_engine,
    processes_of_group,
    publish,
    requests,
    shared_memory_files,
    tiny_model,
    wait_until_gone,
)

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.rollout.api import EngineDied, EngineError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model(seed=1).save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(model_dir: Path, tmp_path: Path) -> None:
    config = (model_dir / "config.json").read_text().replace("Qwen3ForCausalLM", "UnheardOfForCausalLM")
    (tmp_path / "config.json").write_text(config)
    engine = make_engine(tmp_path, tmp_path / "engine.log")
    with pytest.raises(EngineDied, match="(?s)ended while starting.*engine.log, last lines:.*UnheardOfForCausalLM"):
        engine.wait_ready()
    assert wait_until_gone(engine._server.pid) == []


@pytest.mark.slow
def test_a_start_that_takes_too_long_is_ended(model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(model_dir, tmp_path / "engine.log", config=RolloutConfig(startup_timeout_s=1.0))
    with pytest.raises(EngineError, match="not ready after 1 s \\(rollout.startup_timeout_s\\)"):
        engine.wait_ready()
    assert wait_until_gone(engine._server.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_dead_engine_is_noticed_in_mid_generation_and_can_be_restarted(
    model_dir: Path, tmp_path: Path, victim: str
) -> None:
    model = tiny_model(seed=1)
    engine = make_engine(model_dir, tmp_path / "engine.log")
    try:
        publish(engine, model, version=1)
        group = engine._server.pid
        pids = {"server": group, "scheduler": next(pid for pid in processes_of_group(group) if pid != group)}
        died: list[float] = []

        def kill() -> None:
            died.append(time.monotonic())
            os.kill(pids[victim], signal.SIGKILL)

        timer = threading.Timer(1.0, kill)
        timer.start()
        many = requests(PROMPTS * 1000)  # seconds of work, so that the death falls into a call
        with pytest.raises(EngineDied, match="(?s)has ended.*engine.log, last lines:"):
            while True:
                engine.generate(many, SAMPLING)
        assert died and time.monotonic() - died[0] < 10
        with pytest.raises(EngineDied):
            engine.generate(requests(PROMPTS), SAMPLING)
        engine.restart()
        assert wait_until_gone(group) == []
        with pytest.raises(EngineError, match="no weights were published"):
            engine.generate(requests(PROMPTS), SAMPLING)
        publish(engine, model, version=2)
        assert engine.generate(requests(PROMPTS), SAMPLING)[0].weight_versions[0] == 2
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_no_process_outlives_an_owner_that_is_killed(model_dir: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from pathlib import Path\n"
            "from rlmegatron.config.schema import RolloutConfig\n"
            "from rlmegatron.rollout.sglang_engine import EngineSpec, SGLangEngine\n"
            "model, log = sys.argv[1], Path(sys.argv[2])\n"
            "spec = EngineSpec(model_path=model, dtype='fp32', context_length=64, log_path=log, seed=1)\n"
            "engine = SGLangEngine(spec, RolloutConfig())\n"
            "engine.wait_ready()\n"
            "print(engine._server.pid, flush=True)\n"
            "time.sleep(600)\n",
            str(model_dir),
            str(tmp_path / "engine.log"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        files = shared_memory_files(group)
        assert files and len(processes_of_group(group)) >= 2
    finally:
        owner.kill()
        owner.wait()
    assert wait_until_gone(group) == []
    assert not any(path.exists() for path in files)
