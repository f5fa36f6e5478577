"""The client against a server that misbehaves on purpose: what it repeats, what it does not, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import pytest

from rlmegatron.rollout.api import EngineDied, EngineError, GenerationRequest, SamplingConfig
from rlmegatron.rollout.client import ClientLimits, EngineClient, RequestRefused, batch_size

Respond = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


class Rig:
    """A server whose behaviour a test sets, and a client that speaks to it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.is_alive = True
        self.respond: Respond = answer_all
        lock = threading.Lock()
        rig = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                send(self, 200, {})

            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    rig.bodies.append(body)
                    rig.in_flight += len(body.get("input_ids", [0]))
                    rig.most_in_flight = max(rig.most_in_flight, rig.in_flight)
                try:
                    rig.respond(self, body)
                finally:
                    with lock:
                        rig.in_flight -= len(body.get("input_ids", [0]))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.clients: list[EngineClient] = []

    def client(self, *, concurrency: int = 512, timeout_s: float = 10.0, retries: int = 2) -> EngineClient:
        client = EngineClient(
            url=f"http://127.0.0.1:{self.server.server_port}",
            api_key="key",
            limits=ClientLimits(concurrency=concurrency, request_timeout_s=timeout_s, retries=retries),
            alive=lambda: self.is_alive,
            died=lambda: EngineDied("the engine's process has ended"),
            describe=lambda problem: f"{problem}; log engine.log",
        )
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.shutdown()
        self.server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, content: Any) -> None:
    payload = orjson.dumps(content)
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(payload)))
    handler.end_headers()
    handler.wfile.write(payload)


def answer_all(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    send(handler, 200, [{"seed": params["sampling_seed"]} for params in body["sampling_params"]])


def failing_first(num_failures: int, fail: Respond) -> Respond:
    seen = [0]

    def respond(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        seen[0] += 1
        (fail if seen[0] <= num_failures else answer_all)(handler, body)

    return respond


def reset(handler: BaseHTTPRequestHandler, _body: dict[str, Any]) -> None:
    handler.close_connection = True
    handler.connection.close()


def status(code: int) -> Respond:
    return lambda handler, _body: send(handler, code, {"error": "because"})


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def requests(num: int) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_id=i, index=0, token_ids=(1, i), seed=1000 + i) for i in range(num)]


SHORT = SamplingConfig(temperature=1.0, max_new_tokens=6)
LONG = SamplingConfig(temperature=1.0, max_new_tokens=4096)


@pytest.mark.parametrize(("sampling", "num_calls"), [(SHORT, 4), (LONG, 200)])
def test_answers_come_in_the_order_of_the_requests(rig: Rig, sampling: SamplingConfig, num_calls: int) -> None:
    answers = rig.client().generate(requests(200), sampling)
    assert [answer["seed"] for answer in answers] == list(range(1000, 1200))
    assert len(rig.bodies) == num_calls


@pytest.mark.parametrize(("max_new_tokens", "expected"), [(1, 64), (16, 64), (64, 16), (1024, 1), (8192, 1)])
def test_short_answers_share_a_call_and_long_ones_do_not(max_new_tokens: int, expected: int) -> None:
    assert batch_size(max_new_tokens) == expected


@pytest.mark.parametrize("fail", [reset, status(503), status(500), status(429)])
def test_a_transient_failure_is_repeated(rig: Rig, fail: Respond) -> None:
    rig.respond = failing_first(2, fail)
    assert rig.client().generate(requests(1), SHORT) == [{"seed": 1000}]
    assert len(rig.bodies) == 3
    assert rig.bodies[0] == rig.bodies[2]


def test_a_failure_that_stays_is_reported_with_its_log(rig: Rig) -> None:
    rig.respond = status(503)
    with pytest.raises(
        EngineError, match="generation failed 2 times, last with: status 503.*because.*; log engine.log"
    ):
        rig.client(retries=1).generate(requests(1), SHORT)
    assert len(rig.bodies) == 2


@pytest.mark.parametrize("code", [400, 401, 404])
def test_a_refusal_is_not_repeated(rig: Rig, code: int) -> None:
    rig.respond = status(code)
    with pytest.raises(RequestRefused, match=f"/generate was refused .status {code}.*because.*; log engine.log"):
        rig.client().generate(requests(1), SHORT)
    assert len(rig.bodies) == 1


def test_a_control_call_is_never_repeated(rig: Rig) -> None:
    rig.respond = status(503)
    with pytest.raises(EngineError, match="/begin_weight_update failed: status 503"):
        rig.client().call("/begin_weight_update", {}, timeout_s=5)
    assert len(rig.bodies) == 1


def test_a_slow_answer_is_asked_for_again(rig: Rig) -> None:
    rig.respond = failing_first(1, lambda handler, body: time.sleep(2))
    assert rig.client(timeout_s=0.3).generate(requests(1), SHORT) == [{"seed": 1000}]
    assert len(rig.bodies) == 2


def test_requests_in_flight_stay_below_the_bound(rig: Rig) -> None:
    def slowly(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        time.sleep(0.02)
        answer_all(handler, body)

    rig.respond = slowly
    rig.client(concurrency=5).generate(requests(40), LONG)
    assert 2 <= rig.most_in_flight <= 5


def test_a_dead_engine_ends_a_call_that_waits(rig: Rig) -> None:
    release = threading.Event()
    rig.respond = lambda handler, body: (release.wait(20), None)[1]
    client = rig.client(timeout_s=60)

    def die() -> None:
        rig.is_alive = False

    threading.Timer(0.3, die).start()
    start = time.monotonic()
    with pytest.raises(EngineDied):
        client.generate(requests(1), SHORT)
    assert time.monotonic() - start < 3
    release.set()


def test_every_request_carries_its_seed_as_a_signed_64_bit_number(rig: Rig) -> None:
    request = GenerationRequest(prompt_id=0, index=0, token_ids=(1,), seed=2**64 - 1)
    rig.client().generate([request], SHORT)
    assert rig.bodies[0]["sampling_params"][0]["sampling_seed"] == 2**63 - 1
