"""Both sides of the rollout benchmark are asked the same, and a benchmark without torchrun starts it.

Nothing is measured and no engine is started: what SGLang makes of the requests is seen by running the tool.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from bench.launch import become_torchrun
from bench.rollout_pair import requests_of

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.rollout.api import GenerationRequest, SamplingConfig
from rlmegatron.rollout.client import generation_body
from rlmegatron.rollout.placement import place_engines
from rlmegatron.trainer.collect import Rollout, generate
from rlmegatron.types import Prompt, Sample


class Alone:
    """A world of one rank."""

    def settle(self, phase: str, work: Callable[[], Any]) -> Any:
        return work()

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Asked:
    """An engine that keeps what it was asked, as the body of one call."""

    body: Any = None

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Sample]:
        self.body = generation_body(requests, sampling)
        return [Sample(one.prompt_id, one.index, (), (), (), "stop", "") for one in requests]


@pytest.mark.parametrize("replay", [False, True])
def test_the_bare_side_is_asked_what_our_engine_is_asked(replay: bool) -> None:
    config = RolloutConfig(samples_per_prompt=2, temperature=0.7, top_p=0.9, max_new_tokens=5, stop_token_ids=(3,))
    engines = place_engines(world_size=2, tensor=1, ranks_per_node=2, train_tensor=1)
    rollout = Rollout(config, engines, Asked(), engine_index=1, seed=11, replay=replay)  # type: ignore[arg-type]
    run: Any = SimpleNamespace(rollout=rollout, cfg=SimpleNamespace(rollout=config))
    prompts = [Prompt(number, (1, number), "", {}, "") for number in range(5)]
    world: Any = Alone()
    generate(world, rollout, prompts, rollout.training_sampling(), num_samples=2, purpose="bench/0")
    found = requests_of(run, prompts, "bench/0")
    assert found == rollout.engine.body  # type: ignore[union-attr]
    assert found["return_routed_experts"] is replay and found["input_ids"] == [[1, 1], [1, 1], [1, 3], [1, 3]]


def test_without_torchrun_a_benchmark_becomes_torchrun_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *order: called.append(order))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--from", "console"])
    become_torchrun("bench.py", None, num_ranks=4)
    become_torchrun("bench.py", ["--given"], num_ranks=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert called == [
        (sys.executable, [*torchrun, "--nproc-per-node=4", "bench.py", "--from", "console"]),
        (sys.executable, [*torchrun, "--nproc-per-node=2", "bench.py", "--given"]),
    ]
    assert os.environ["OMP_NUM_THREADS"] == "3"
