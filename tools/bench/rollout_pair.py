"""Our way from prompts to samples beside SGLang asked directly, with the same prompts, sampling and weights.

In: a run whose engines serve. Out: timings of both sides. Must never run beside a learner that computes.

There are two bare sides. `OneCall` asks the same server with one plain HTTP call that holds all requests: the same
seeds, so the very same tokens, and whatever differs is our client's. The stock engine is `sglang.Engine` of the same
settings, weights and cores in a process of its own, with no HTTP and nothing of ours in it but, on a CPU, the stand-ins
without which SGLang does not start: whatever differs is all that we put around SGLang. It draws with its own random
numbers, so its answers are others of the same policy; hence speeds, not seconds, are compared. On a CPU it cannot tell
which experts it chose, so with moe.router_replay our side does more there. Every round has fresh prompts, the same for
both sides, and an empty KV cache, as a training step has.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.bare_sglang import BareEngine
from bench.measure import Timing

from rlmegatron.distributed.world import World
from rlmegatron.platform.sglang_cpu import engine_support, find_engine_needs, parse_cores
from rlmegatron.rollout.api import GenerationRequest
from rlmegatron.rollout.client import generation_body
from rlmegatron.rollout.server import EngineServer, child_environment
from rlmegatron.trainer.collect import generate, sample_seed
from rlmegatron.trainer.run import Run
from rlmegatron.types import Prompt

SETTINGS = (
    "dtype",
    "tp_size",
    "base_gpu_id",
    "context_length",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "random_seed",
    "skip_tokenizer_init",
    "sampling_backend",
    "sleep_on_idle",
    "enable_memory_saver",
    "device",
    "attention_backend",
    "grammar_backend",
    "disable_cuda_graph",
    "enable_return_routed_experts",
)
"""Server arguments that the stock engine takes over from our server, besides rollout.engine_args."""
FLUSH_TRIES = 100


class BareSide(Protocol):
    """A way to ask SGLang directly, on the rank that leads an engine."""

    def load(self, requests: Mapping[str, Any]) -> None:
        """Get ready for a round; not timed."""

    def generate(self) -> int:
        """Answer them; the number of tokens sampled."""


class OneCall:
    """One HTTP call to our own server."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._body = b""

    def load(self, requests: Mapping[str, Any]) -> None:
        """Empty the cache and encode the call."""
        flush(self._server)
        self._body = json.dumps(requests).encode()

    def generate(self) -> int:
        """Post and decode."""
        answers = json.loads(_post(self._server, "/generate", self._body))
        return sum(len(answer["output_ids"]) for answer in answers)


class Rounds:
    """Both sides, round by round: side by side they are given the same prompts."""

    def __init__(self, run: Run, bare: BareSide | None) -> None:
        """bare: on ranks that lead an engine, None elsewhere."""
        self._run, self._bare = run, bare
        self._draws = {"ours": 0, "bare": 0}
        self._prompts: list[list[Prompt]] = []

    def ours(self) -> Timing:
        """As the loop generates."""
        prompts, purpose = self._draw("ours")
        run, config = self._run, self._run.cfg.rollout
        if run.rollout.engine is not None:
            flush(run.rollout.engine.server)
        found = []

        def work() -> None:
            sampling = run.rollout.training_sampling()
            samples = config.samples_per_prompt
            found.extend(generate(run.world, run.rollout, prompts, sampling, num_samples=samples, purpose=purpose))

        seconds = timed(run.world, work)
        num_tokens = sum(len(sample.token_ids) for group in found for sample in group.samples)
        return Timing(seconds, sum(run.world.gather(num_tokens)))

    def bare(self) -> Timing:
        """As SGLang alone does."""
        prompts, purpose = self._draw("bare")
        counts = [0]
        if self._bare is not None:
            self._bare.load(requests_of(self._run, prompts, purpose))

        def work() -> None:
            if self._bare is not None:
                counts[0] = self._bare.generate()

        seconds = timed(self._run.world, work)
        return Timing(seconds, sum(self._run.world.gather(counts[0])))

    def _draw(self, side: str) -> tuple[list[Prompt], str]:
        """The side's next prompts; whoever comes first in a round draws them for both."""
        number = self._draws[side]
        self._draws[side] += 1
        if number == len(self._prompts):
            run = self._run
            self._prompts.append(run.world.lead(lambda: _take(run)))
        return self._prompts[number], f"bench/{number}"


def requests_of(run: Run, prompts: Sequence[Prompt], purpose: str) -> dict[str, Any]:
    """What `generate` asks this rank's engine, as one call to SGLang."""
    asked = [
        GenerationRequest(prompt.id, index, prompt.token_ids, sample_seed(run.rollout.seed, purpose, prompt.id, index))
        for prompt in run.rollout.share(prompts)
        for index in range(run.cfg.rollout.samples_per_prompt)
    ]
    return generation_body(asked, run.rollout.training_sampling())


def start_stock_engine(run: Run, *, weights: Path, cores: Sequence[str], log_path: Path) -> BareEngine | None:
    """A stock engine beside this rank's engine, None where it leads none; ready when `wait_ready` returns."""
    engine = run.rollout.engine
    if engine is None:
        return None
    found = find_engine_needs()
    support = engine_support(
        found,
        cores=cores,
        context_length=run.cfg.context_length,
        max_running_requests=run.cfg.rollout.max_running_requests,
    )
    info = json.loads(_get(engine.server, "/server_info"))
    taken = {name: info[name] for name in (*SETTINGS, *run.cfg.rollout.engine_args)}
    if not found.cuda:
        taken["enable_return_routed_experts"] = False  # it would need code of ours; see rollout/expert_capture.py
    return BareEngine(
        server_args={**taken, "model_path": str(weights), "log_level": "info"},
        cores=[] if found.cuda else [parse_cores(entry) for entry in cores],
        environment=child_environment(engine.server.environment, support.python_path),
        log_path=log_path,
    )


def timed(world: World, work: Callable[[], object]) -> float:
    """Seconds until the last rank has done it."""
    world.barrier()
    started = time.perf_counter()
    work()
    world.barrier()
    return time.perf_counter() - started


def flush(server: EngineServer) -> None:
    """Empty the KV cache; refused while a finished request is still being put away."""
    for _ in range(FLUSH_TRIES):
        try:
            _post(server, "/flush_cache", b"")
            return
        except urllib.error.HTTPError:
            time.sleep(0.05)
    raise RuntimeError(server.describe("the engine does not become idle"))


def _take(run: Run) -> list[Prompt]:
    assert run.prompts is not None, "rank 0 holds the prompts"
    return list(run.prompts.take(run.cfg.rollout.prompts_per_step))


def _get(server: EngineServer, path: str) -> bytes:
    return _open(urllib.request.Request(server.url + path, headers=_headers(server)))


def _post(server: EngineServer, path: str, body: bytes) -> bytes:
    headers = {**_headers(server), "Content-Type": "application/json"}
    return _open(urllib.request.Request(server.url + path, data=body, headers=headers))


def _headers(server: EngineServer) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.api_key}"}


def _open(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request) as response:
        content: bytes = response.read()
    return content
