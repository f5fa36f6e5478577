"""The stand-in engine: it loads as SGLang's placement says, reports what goes wrong, and leaves no process behind.

What this does not prove: that SGLang places tensors so; `tests/unit/weight_sync/test_engine_layout_in_sglang.py` does.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.stand_in_engine import StandInEngine
from bench.stand_in_model import GARBAGE
from bench.synthetic_model import architecture_for, content
from bench.worker_server import WorkerServer
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.decoder_rules import HEAD
from rlmegatron.rollout.api import EngineDied, EngineError

HERE = Path(__file__).stem
CALLS: dict[int, int] = {}


def raise_on_rank_1(model: Any, named_tensors: Any) -> None:
    """A loader; the tensor says on which rank it runs."""
    if int(dict(named_tensors)["rank"]) == 1:
        raise KeyError("no such buffer")


def set_norm(model: Any, named_tensors: Any) -> None:
    """A loader that writes into live parameters."""
    dict(model.named_parameters())["model.norm.weight"].detach().fill_(float(dict(named_tensors)["value"]))


def count_calls(model: Any, named_tensors: Any) -> None:
    """A loader that keeps something by model: the norm becomes how often this model object was seen."""
    CALLS[id(model)] = CALLS.get(id(model), 0) + 1
    dict(model.named_parameters())["model.norm.weight"].detach().fill_(CALLS[id(model)])


def sleep_for_ever(model: Any, named_tensors: Any) -> None:
    """A loader whose partner never comes."""
    time.sleep(600)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with WorkerServer() as running:
        yield running.address


def small(family: str) -> Architecture:
    return architecture_for(family, num_bytes=1e6, itemsize=4, layer_multiple=2)


def checkpoint(arch: Architecture) -> list[tuple[str, Tensor]]:
    found = []
    for part in (part for rule in arch.parameter_rules(1) if not rule.copy for part in rule.parts):
        tensor = torch.empty(part.shape)
        content(part, tuple((0, size) for size in part.shape), seed=0, out=tensor)
        found.append((part.name, tensor))
    return found


def opened(arch: Architecture, server: str, *, tensor: int = 2, **settings: Any) -> StandInEngine:
    engine = StandInEngine(arch, tensor=tensor, dtype=torch.float32, server=server, **settings)
    engine.begin_weight_update()
    return engine


def test_each_rank_keeps_its_share_of_fused_parameters(server: str) -> None:
    """By hand, for the grouped-query attention and the MLP of layer 1: 16 heads and 8 KV heads over two ranks."""
    arch = small("qwen3")
    tensors = dict(checkpoint(arch))
    here = "model.layers.1."
    with opened(arch, server) as engine:
        engine.update_weights(list(tensors.items()))
        engine.end_weight_update(version=3)
        assert (engine.version, engine.is_serving) == (3, True)
        for rank in range(2):
            q, k, v, gate, up = (
                tensors[f"{here}{name}.weight"].chunk(2)[rank]
                for name in (
                    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    *("mlp.gate_proj", "mlp.up_proj"),
                )
            )
            assert torch.equal(engine.read(rank, f"{here}self_attn.qkv_proj.weight"), torch.cat([q, k, v]))
            assert torch.equal(engine.read(rank, f"{here}mlp.gate_up_proj.weight"), torch.cat([gate, up]))
            down = tensors[f"{here}mlp.down_proj.weight"].chunk(2, 1)[rank]
            assert torch.equal(engine.read(rank, f"{here}mlp.down_proj.weight"), down)
            norm = engine.read(rank, "model.norm.weight")
            assert torch.equal(norm, tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("family", "expert"),
    [("qwen3", 1), ("qwen3_moe", 1), ("qwen3_moe", 2), ("mixtral", 2), ("deepseek_v2", 1), ("deepseek_v3", 2)],
)
def test_a_whole_checkpoint_leaves_no_garbage(family: str, expert: int, server: str) -> None:
    arch = small(family)
    garbage = torch.full((4,), GARBAGE, dtype=torch.uint8).view(torch.float32)
    with opened(arch, server, expert=expert) as engine:
        names = [name for name, tensor in engine.parameters(1) if bool((tensor == garbage).all())]
        assert len(names) == len(list(engine.parameters(1))) > 10
        engine.update_weights(checkpoint(arch))
        assert not [name for name, tensor in engine.parameters(1) if bool((tensor == garbage).any())]


def test_experts_lie_where_expert_parallelism_has_them(server: str) -> None:
    arch = small("qwen3_moe")
    tensors, block = dict(checkpoint(arch)), "model.layers.1.mlp.experts"
    with opened(arch, server, expert=2) as engine:
        engine.update_weights(list(tensors.items()))
        held = engine.read(1, f"{block}.w2_weight")
        assert torch.equal(held[3], tensors[f"{block}.11.down_proj.weight"])
        assert len(held) == 8


def test_what_sglang_derives_is_derived_on_loading(server: str) -> None:
    """DeepSeek's absorbed keys and values, by hand from `kv_b_proj`."""
    arch = small("deepseek_v3")
    latent, block = arch.latent, "model.layers.1.self_attn"
    assert latent is not None
    with opened(arch, server) as engine:
        tensors = checkpoint(arch)
        engine.update_weights([(name, tensor) for name, tensor in tensors if "kv_b_proj" not in name])
        before = engine.read(1, f"{block}.w_kc")
        engine.update_weights([(name, tensor) for name, tensor in tensors if "kv_b_proj" in name])
        heads = dict(tensors)[f"{block}.kv_b_proj.weight"].view(arch.num_heads, -1, latent.kv_rank).chunk(2)[1]
        assert not torch.equal(engine.read(1, f"{block}.w_kc"), before)
        assert torch.equal(engine.read(1, f"{block}.w_kc"), heads[:, : latent.nope_dim])
        assert torch.equal(engine.read(1, f"{block}.w_vc"), heads[:, latent.nope_dim :].mT)
        assert f"{block}.w_kc" not in dict(engine.parameters(1))


def test_bf16_engines_keep_what_must_stay_fp32(server: str) -> None:
    arch = small("deepseek_v3")
    engine = StandInEngine(arch, tensor=1, dtype=torch.bfloat16, server=server)
    with engine:
        found = {name: tensor.dtype for name, tensor in engine.parameters(0)}
    wide = {name for name, dtype in found.items() if dtype == torch.float32}
    assert wide == {"model.layers.1.mlp.gate.e_score_correction_bias"} and set(found.values()) > {torch.bfloat16}


def test_a_name_that_nobody_has_is_passed_over(server: str) -> None:
    with opened(small("qwen3"), server) as engine:
        engine.update_weights([("model.layers.77.mlp.up_proj.weight", torch.ones(3, 3))])


def test_a_loader_writes_into_live_parameters_of_every_rank(server: str) -> None:
    with opened(small("qwen3"), server) as engine:
        values = [torch.tensor([3.0]), torch.tensor([4.0])]
        engine.update_weights([("value", values)], load_format=f"{HERE}.set_norm")
        assert [float(engine.read(rank, "model.norm.weight")[5]) for rank in range(2)] == [3.0, 4.0]


def test_what_loaders_keep_by_model_they_keep_for_each_caller(server: str) -> None:
    with opened(small("qwen3"), server, tensor=1) as engine:
        counts = []
        for caller in ("peer", "collective", "peer"):
            engine.caller = caller
            engine.update_weights([("nothing", torch.ones(1))], load_format=f"{HERE}.count_calls")
            counts.append(float(engine.read(0, "model.norm.weight")[0]))
        assert counts == [1.0, 1.0, 2.0]


def test_a_loader_that_raises_is_reported_and_the_engine_lives_on(server: str) -> None:
    with opened(small("qwen3"), server) as engine:
        ranks = [torch.tensor(0), torch.tensor(1)]
        with pytest.raises(EngineError, match=r"(?s)rank 1 .*KeyError: 'no such buffer'"):
            engine.update_weights([("rank", ranks)], load_format=f"{HERE}.raise_on_rank_1")
        assert engine.alive() and not engine.is_serving
        with pytest.raises(EngineError, match="is failed"):
            engine.end_weight_update(version=1)
        engine.begin_weight_update()
        engine.update_weights([("value", [torch.ones(1)] * 2)], load_format=f"{HERE}.set_norm")
        engine.end_weight_update(version=2)
        assert engine.is_serving
        engine.distrust_weights()
        assert not engine.is_serving


def test_weights_come_only_between_begin_and_end(server: str) -> None:
    with StandInEngine(small("qwen3"), tensor=1, dtype=torch.float32, server=server) as engine:
        with pytest.raises(EngineError, match="no weight update is open"):
            engine.update_weights([(HEAD, torch.ones(1))])
        with pytest.raises(EngineError, match="refuses to generate: it is unpublished"):
            engine.generate([], None)  # type: ignore[arg-type]


def test_a_worker_that_dies_takes_its_engine_along_until_it_is_restarted(server: str) -> None:
    with opened(small("qwen3"), server) as engine:
        pids, incarnation = engine.worker_pids, engine.incarnation
        engine.kill(1)
        wait_until_gone(pids[1])
        assert not engine.alive()
        with pytest.raises(EngineDied):
            engine.update_weights([("nothing", torch.ones(1))])
        wait_until_gone(pids[0])
        with pytest.raises(EngineDied):
            engine.begin_weight_update()
        engine.restart()
        assert engine.alive() and engine.incarnation > incarnation and engine.version is None
        assert not set(engine.worker_pids) & set(pids)
        engine.begin_weight_update()


def test_a_worker_that_dies_in_mid_update_ends_the_call(server: str) -> None:
    with opened(small("qwen3"), server) as engine:
        pids = engine.worker_pids
        killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(.5); os.kill({pids[0]}, 9)"])
        with pytest.raises(EngineDied, match="rank 0"):
            engine.update_weights([("nothing", torch.ones(1))], load_format=f"{HERE}.sleep_for_ever")
        killer.wait()
        wait_until_gone(pids[1])


def test_workers_end_with_their_lead_even_in_mid_air(server: str) -> None:
    """The lead is killed while its worker is inside of a loader that never returns."""
    code = (
        "import torch, pickle, base64, sys\n"
        "from bench.stand_in_engine import StandInEngine\n"
        "arch, address = pickle.loads(base64.b64decode(sys.argv[1]))\n"
        "engine = StandInEngine(arch, tensor=1, dtype=torch.float32, server=address)\n"
        "engine.begin_weight_update()\n"
        "print(engine.worker_pids[0], flush=True)\n"
        f"engine.update_weights([('nothing', torch.ones(1))], load_format='{HERE}.sleep_for_ever')\n"
    )
    given = base64.b64encode(pickle.dumps((small("qwen3"), server))).decode()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    lead = subprocess.Popen([sys.executable, "-c", code, given], stdout=subprocess.PIPE, text=True, env=environment)
    assert lead.stdout is not None
    worker = int(lead.stdout.readline())
    time.sleep(0.5)
    lead.send_signal(signal.SIGKILL)
    lead.communicate()
    wait_until_gone(worker)


def test_a_server_ends_with_its_owner() -> None:
    code = (
        "import os, time\n"
        "from bench.worker_server import WorkerServer, connect\n"
        "server = WorkerServer()\n"
        "print(server._process.pid, connect(server.address).recv(), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    for pid in pids:
        wait_until_gone(pid)


def wait_until_gone(pid: int, *, timeout_s: float = 20.0) -> None:
    """A zombie that waits for somebody to put it away is gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} still runs")
