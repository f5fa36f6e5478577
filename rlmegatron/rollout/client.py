"""Speaks HTTP to one SGLang server: generation with bounded concurrency and retries, and control calls.

In: token ids and sampling settings. Out: SGLang's answers as decoded JSON, in the order of the requests. Must never
import torch or sglang, and never turn text into tokens.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson

from rlmegatron.rollout.api import EngineDied, EngineError, GenerationRequest, SamplingConfig

BATCH_TOKENS = 1024
MAX_BATCH = 64
SEED_MASK = 2**63 - 1
# Below the server's own 5 s, or a call could go out on a connection that the server is just closing.
KEEP_ALIVE_S = 2.0
BACKOFF_S = 0.25
LIVENESS_POLL_S = 0.5
DEATH_GRACE_S = 5.0
TRANSIENT_STATUS = frozenset({429, 500, 502, 503, 504})
Answer = dict[str, Any]
T = TypeVar("T")


class RequestRefused(EngineError):
    """The server understood a request and refused it, so sending it again is pointless."""


class _Transient(Exception):
    """A failure that another attempt may not meet."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How hard a client tries."""

    concurrency: int
    """Requests in flight."""
    request_timeout_s: float
    """Longest wait for an answer, seconds."""
    retries: int
    """Further attempts after a transient failure."""


class EngineClient:
    """One connection pool on one event-loop thread.

    url, api_key: where the server listens. alive: whether its process runs. died: makes the error that says it does
    not. describe: adds the server's log to a message.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key: str,
        limits: ClientLimits,
        alive: Callable[[], bool],
        died: Callable[[], EngineDied],
        describe: Callable[[str], str],
    ) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._limits = limits
        self._alive = alive
        self._died = died
        self._describe = describe
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Answer]:
        """Answers in the order of the requests; raises EngineDied, RequestRefused or EngineError."""
        return self._run(self._generate(requests, sampling))

    def call(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Answer:
        """One control call, never repeated; raises RequestRefused, EngineDied or EngineError."""
        try:
            answer = self._run(self._post(path, body, timeout_s=timeout_s))
        except _Transient as problem:
            raise EngineError(self._describe(f"{path} failed: {problem}")) from problem
        return answer if isinstance(answer, dict) else {"answer": answer}

    def close(self) -> None:
        """Close connections and end the thread; safe to call twice."""
        if self._loop.is_closed():
            return
        if self._session is not None:
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` on the loop's thread, but no longer than the server lives."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(timeout=LIVENESS_POLL_S)
                except concurrent.futures.TimeoutError:
                    if not future.done() and not self._alive():
                        raise self._died() from None
        finally:
            future.cancel()

    async def _generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Answer]:
        size = min(batch_size(sampling.max_new_tokens), self._limits.concurrency)
        slots = asyncio.Semaphore(self._limits.concurrency // size)

        async def one(batch: Sequence[GenerationRequest]) -> list[Answer]:
            async with slots:
                return await self._generate_batch(batch, sampling)

        batches = [requests[first : first + size] for first in range(0, len(requests), size)]
        tasks = [asyncio.create_task(one(batch)) for batch in batches]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [answer for batch in answers for answer in batch]

    async def _generate_batch(self, batch: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Answer]:
        body = generation_body(batch, sampling)
        for attempt in range(self._limits.retries + 1):
            try:
                answers = await self._post("/generate", body, timeout_s=self._limits.request_timeout_s)
                assert len(answers) == len(batch), f"{len(answers)} answers to {len(batch)} requests"
                return list(answers)
            except _Transient as problem:
                if attempt == self._limits.retries:
                    message = f"generation failed {attempt + 1} times, last with: {problem}"
                    raise EngineError(self._describe(message)) from problem
                await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._open_session().post(
                self._url + path, data=orjson.dumps(body), timeout=timeout
            ) as response:
                content = await response.read()
        except TimeoutError:
            raise _Transient(f"no answer within {timeout_s:.0f} s") from None
        except (aiohttp.ClientError, ConnectionError) as problem:
            await self._raise_if_dying()
            raise _Transient(f"{type(problem).__name__}: {problem}") from problem
        if response.status == 200:
            return orjson.loads(content) if response.content_type == "application/json" else content.decode()
        text = content.decode(errors="replace")
        if response.status in TRANSIENT_STATUS:
            raise _Transient(f"status {response.status}: {text}")
        raise RequestRefused(self._describe(f"{path} was refused (status {response.status}): {text}"))

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, trust_env=False)
        return self._session

    async def _raise_if_dying(self) -> None:
        # A broken connection is often the first sign of a process that takes a moment longer to be gone.
        for _ in range(int(DEATH_GRACE_S / LIVENESS_POLL_S)):
            if not self._alive():
                raise self._died()
            if await self._answers():
                return
            await asyncio.sleep(LIVENESS_POLL_S)

    async def _answers(self) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=LIVENESS_POLL_S)
            async with self._open_session().get(f"{self._url}/health", timeout=timeout):
                return True
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False


def batch_size(max_new_tokens: int) -> int:
    """Requests per HTTP call: many short answers share the cost of a call, long ones do not wait for each other."""
    return max(1, min(MAX_BATCH, BATCH_TOKENS // max_new_tokens))


def generation_body(batch: Sequence[GenerationRequest], sampling: SamplingConfig) -> dict[str, Any]:
    """What SGLang is asked for `batch`: the body of /generate, or the arguments of its `Engine.generate`."""
    shared = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return {
        "input_ids": [list(request.token_ids) for request in batch],
        "sampling_params": [{**shared, "sampling_seed": request.seed & SEED_MASK} for request in batch],
        "return_logprob": True,
        "return_routed_experts": sampling.routed_experts,
    }
