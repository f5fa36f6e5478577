"""A rollout engine on SGLang: the `RolloutEngine` of `api.py` over one server process and its client.

In: prompts as token ids, new weights. Out: `Sample`s whose tokens carry log-probabilities and weight versions. Must
never import megatron or torch.distributed, and never generate with weights that were not published.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.platform.sglang_cpu import engine_support, find_engine_needs
from rlmegatron.rollout.answers import to_sample
from rlmegatron.rollout.api import EngineError, GenerationRequest, RoutedLayers, SamplingConfig
from rlmegatron.rollout.client import ClientLimits, EngineClient, RequestRefused
from rlmegatron.rollout.placement import visible_devices
from rlmegatron.rollout.server import EngineServer
from rlmegatron.rollout.tensor_payload import pack_for_ranks
from rlmegatron.types import Sample

CONTROL_TIMEOUT_S = 600.0
FLUSH_TIMEOUT_S = 30.0
SGLANG_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
Part = Literal["weights", "kv_cache"]
State = Literal["unpublished", "updating", "failed", "serving"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one engine is: which model, where, on what."""

    model_path: str
    """Directory with config.json and tokenizer; weights in it are not read, they come with the first publish."""
    dtype: Literal["bf16", "fp32"]
    context_length: int
    """Longest prompt plus answer, tokens."""
    log_path: Path
    """The server's log; every start appends to it."""
    seed: int
    """Seed of whatever SGLang draws outside of requests."""
    devices: tuple[int, ...] = ()
    """Device of each engine rank, as this process numbers them; none means the first ones."""
    cores: tuple[str, ...] = ()
    """Core list such as "0-3,8" of each engine rank, on a CPU; none means the cores of this process for each."""
    custom_weight_loaders: tuple[str, ...] = ()
    """'package.module.function' names that `update_weights` may give as `load_format`."""
    routed: RoutedLayers | None = None
    """The layers whose experts answers can tell; None, and the engine does not keep them."""


class SGLangEngine:
    """One engine, owned by the process that builds it.

    The constructor starts the server and returns at once; `wait_ready`, or the first call that needs the server, waits.
    A new engine is unpublished: it generates only after begin_weight_update .. end_weight_update.
    """

    def __init__(
        self, spec: EngineSpec, config: RolloutConfig, *, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        """decode: turns an answer's token ids into `Sample.text`, once; None leaves texts empty."""
        self.tensor = config.tensor
        self.version: int | None = None
        self._spec = _checked(spec, config)
        self._config = config
        self._decode = decode
        self._launch()

    def _launch(self) -> None:
        found = find_engine_needs()
        self._on_device = found.cuda
        cores = self._spec.cores or (",".join(map(str, sorted(os.sched_getaffinity(0)))),) * self.tensor
        support = engine_support(
            found,
            cores=cores,
            context_length=self._spec.context_length,
            max_running_requests=self._config.max_running_requests,
        )
        self._server = EngineServer(
            server_args=_server_args(self._spec, self._config, support.server_args, on_device=found.cuda),
            environment={"HF_HUB_OFFLINE": "1", **support.environment, **self._devices()},
            python_path=support.python_path,
            cores=() if found.cuda else cores,
            fork_workers=not found.cuda,
            log_path=self._spec.log_path,
        )
        self._client: EngineClient | None = None
        self._state: State = "unpublished"
        self._awake: set[Part] = {"weights", "kv_cache"}
        self._update_is_open = False

    def _devices(self) -> dict[str, str]:
        if not self._on_device:
            return {}
        # SGLang itself can only count on from one device, in steps of one size.
        visible = visible_devices(
            self._spec.devices or range(self.tensor),
            inherited=os.environ.get("CUDA_VISIBLE_DEVICES"),
            num_visible=torch.cuda.device_count(),
        )
        return {"CUDA_VISIBLE_DEVICES": visible}

    def wait_ready(self) -> None:
        """Wait for the server; raises EngineDied or EngineError, both with the end of its log."""
        if self._client is None:
            self._server.wait_ready(self._config.startup_timeout_s)
            self._client = EngineClient(
                url=self._server.url,
                api_key=self._server.api_key,
                limits=ClientLimits(self._config.concurrency, self._config.request_timeout_s, self._config.retries),
                alive=self._server.alive,
                died=self._server.died,
                describe=self._server.describe,
            )
            # On a CPU, SGLang collects garbage at every flush, a walk of half a second over what its start has left,
            # unless that is frozen. Without a warm-up its own attempt races with its socket, and often loses.
            self._client.call("/freeze_gc", {}, timeout_s=CONTROL_TIMEOUT_S)

    @property
    def server(self) -> EngineServer:
        """The server process, for tools that speak to it directly."""
        return self._server

    @property
    def incarnation(self) -> int:
        """The server's process, which a restart replaces."""
        return self._server.pid

    def alive(self) -> bool:
        """Whether the engine's process runs."""
        return self._server.alive()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Sample]:
        """Answers in the order of the requests, each decided by its seed; at temperature 0 log-probs are those of 1.

        Raises ValueError for a prompt that cannot fit, EngineDied, or EngineError (asleep, not published, refused).
        """
        self._require_serving()
        for request in requests:
            num_prompt = len(request.token_ids)
            if not 0 < num_prompt <= self._spec.context_length - sampling.max_new_tokens:
                raise ValueError(
                    f"prompt {request.prompt_id}: {num_prompt} prompt tokens + {sampling.max_new_tokens} new tokens "
                    f"do not fit the engine; allowed are {self._spec.context_length} in all "
                    "(rollout.context_length), at least 1 of them prompt"
                )
        routed = self._spec.routed if sampling.routed_experts else None
        assert not sampling.routed_experts or routed, "the engine was not started to tell which experts it chose"
        answers = self._connection().generate(requests, sampling)
        return [
            to_sample(request, answer, self._decode, routed=routed)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def sleep(self) -> None:
        """Free the device memory (no-op on a CPU); afterwards the engine needs `wake` and a new publish."""
        if self._state == "updating":
            raise EngineError("the engine cannot sleep during a weight update; end it first")
        if self._on_device and self._awake:
            self._flush()
            self._call("/release_memory_occupation", {"tags": sorted(self._awake)})
        self._awake.clear()
        self._state = "unpublished"

    def wake(self, *, weights: bool = False, kv_cache: bool = False) -> None:
        """Take device memory for the named parts again; parts that are awake already are left alone."""
        wanted: set[Part] = set()
        if weights:
            wanted.add("weights")
        if kv_cache:
            wanted.add("kv_cache")
        asleep = wanted - self._awake
        if self._on_device and asleep:
            self._call("/resume_memory_occupation", {"tags": sorted(asleep)})
        self._awake |= asleep

    def begin_weight_update(self) -> None:
        """Stop serving and open an update; a failed one is given up."""
        if "weights" not in self._awake:
            raise EngineError("the engine's weights are asleep; call wake(weights=True) before a weight update")
        if self._state == "updating":
            raise EngineError("a weight update is open already; end it first")
        self._state = "failed"
        if self._update_is_open:
            self._control("/end_weight_update", {})
            self._update_is_open = False
        self._flush()
        self._control("/begin_weight_update", {})
        self._update_is_open = True
        self._state = "updating"

    def update_weights(self, named_tensors: Sequence[tuple[str, Any]], *, load_format: str | None = None) -> None:
        """Load one bucket.

        named_tensors: full Hugging Face tensors, or, for a loader named by `load_format`, tensors or one payload
        per engine rank (see `tensor_payload`). CUDA memory may be used again when the engine has been told to end the
        update. Raises ValueError for a loader that was not registered, EngineError when the engine could not load.
        """
        self._require_open_update()
        if load_format is not None and load_format not in self._spec.custom_weight_loaders:
            known = ", ".join(self._spec.custom_weight_loaders) or "none"
            raise ValueError(f"load_format {load_format!r} was not registered at start; registered: {known}")
        self._state = "failed"
        body = {
            "serialized_named_tensors": pack_for_ranks(named_tensors, num_ranks=self.tensor),
            "load_format": load_format,
            "flush_cache": False,
        }
        self._control("/update_weights_from_tensor", body)
        self._state = "updating"

    def end_weight_update(self, *, version: int) -> None:
        """Close the update, flush the KV cache and stamp `version` on every token generated from now on."""
        self._require_open_update()
        self._state = "failed"
        self._control("/end_weight_update", {})
        self._update_is_open = False
        self._flush()
        self._control("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.version = version
        self._state = "serving"

    def distrust_weights(self) -> None:
        """Refuse to generate until a publish succeeds: one has failed here or in another engine."""
        if self._state in ("updating", "serving"):
            self._state = "failed"

    def restart(self) -> None:
        """Replace the server, dead or not, by a new one; the engine is awake and unpublished afterwards."""
        self.shutdown()
        self.version = None
        self._launch()
        self.wait_ready()

    def shutdown(self) -> None:
        """End the engine's processes; safe to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._server.stop()

    def _require_serving(self) -> None:
        missing = sorted({"weights", "kv_cache"} - self._awake)
        if missing:
            raise EngineError(f"the engine is asleep ({', '.join(missing)}); wake it and publish before generating")
        if self._state != "serving":
            reasons = {
                "unpublished": "no weights were published to it since it started or slept",
                "updating": "a weight update is open",
                "failed": "its last weight update failed or was not finished",
            }
            raise EngineError(f"the engine refuses to generate: {reasons[self._state]}")

    def _require_open_update(self) -> None:
        if self._state != "updating":
            raise EngineError(f"no weight update is open (the engine is {self._state}); call begin_weight_update first")

    def _connection(self) -> EngineClient:
        self.wait_ready()
        assert self._client is not None, "wait_ready connects"
        if not self._server.alive():
            raise self._server.died()
        return self._client

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._connection().call(path, body, timeout_s=CONTROL_TIMEOUT_S)

    def _control(self, path: str, body: dict[str, Any]) -> None:
        answer = self._call(path, body)
        if answer["success"] is not True:
            raise EngineError(self._server.describe(f"{path} failed: {answer['message']}"))

    def _flush(self) -> None:
        """Empty the KV cache; the server refuses while a finished request is still being put away."""
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while True:
            try:
                self._call("/flush_cache?timeout=10", {})
                return
            except RequestRefused:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _checked(spec: EngineSpec, config: RolloutConfig) -> EngineSpec:
    model = Path(spec.model_path)
    if not (model / "config.json").is_file():
        raise ValueError(f"model.path: {spec.model_path} is not a Hugging Face directory (it has no config.json)")
    if spec.cores and len(spec.cores) != config.tensor:
        raise ValueError(f"{len(spec.cores)} core lists for an engine of {config.tensor} ranks: {spec.cores}")
    if spec.devices and len(spec.devices) != config.tensor:
        raise ValueError(f"{len(spec.devices)} devices for an engine of {config.tensor} ranks: {spec.devices}")
    return replace(spec, model_path=str(model.resolve()), log_path=spec.log_path.resolve())


def _server_args(
    spec: EngineSpec, config: RolloutConfig, support: dict[str, str | int | float | bool], *, on_device: bool
) -> dict[str, Any]:
    args: dict[str, Any] = {
        "model_path": spec.model_path,
        "load_format": "dummy",
        "dtype": SGLANG_DTYPES[spec.dtype],
        "tp_size": config.tensor,
        "ep_size": config.expert,
        "context_length": spec.context_length,
        "max_running_requests": config.max_running_requests,
        "mem_fraction_static": config.mem_fraction,
        "random_seed": spec.seed,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",  # the one that can draw by a request's own seed
        "enable_fp32_lm_head": True,  # as the learner; rounded logits would part their log-probabilities
        "sleep_on_idle": True,
        "enable_memory_saver": on_device,
        "custom_weight_loader": list(spec.custom_weight_loaders),
        "enable_return_routed_experts": spec.routed is not None,
        **support,
    }
    if config.expert > 1:
        args["disable_shared_experts_fusion"] = True  # some GPUs would copy them to every part, in other shares
    if config.max_total_tokens is not None:
        args["max_total_tokens"] = config.max_total_tokens
    return {**args, **config.engine_args}
