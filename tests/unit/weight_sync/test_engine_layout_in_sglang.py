"""Where SGLang keeps each tensor, against SGLang's own model classes and loaders: every family, at several sizes.

What this does not prove: the layout under other MoE backends than Triton's and the CPU's.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import NAMES, architecture, checkpoint, config
from sglang_models import Job
from torch import Tensor

from rlmegatron.models.load import slices
from rlmegatron.platform.sglang_cpu import EngineFindings, engine_support
from rlmegatron.weight_sync.digest import digest
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_loader import loadable
from rlmegatron.weight_sync.engine_placement import Placement

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang's classes are built for the CPU here")

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Case:
    name: str
    tp: int
    on_cpu: bool
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    fuses: bool = False
    ep: int = 1

    def __str__(self) -> str:
        where = "cpu" if self.on_cpu else "gpu"
        changes = ",".join(f"{key}={value}" for key, value in self.changes.items())
        cut = f"tp{self.tp}" + f"ep{self.ep}" * (self.ep > 1)
        return f"{self.name}-{cut}-{where}-{self.dtype}{'-fuses' * self.fuses}-{changes}"


SPREAD: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 8, "num_key_value_heads": 4},
    "MixtralForCausalLM": {"num_local_experts": 8, "num_key_value_heads": 4},
    "DeepseekV2ForCausalLM": {"n_routed_experts": 4},
    "DeepseekV3ForCausalLM": {"n_routed_experts": 8},
}


def narrow(name: str) -> dict[str, Any]:
    of_experts = {"moe_intermediate_size": 24} if "moe_intermediate_size" in config(name) else {}
    return {"intermediate_size": 40, **of_experts}


def cases() -> Iterator[Case]:
    for name in NAMES:
        yield from (Case(name, 1, True), Case(name, 2, True), Case(name, 2, False))
        yield Case(name, 2, True, {"tie_word_embeddings": True})
        yield Case(name, 2, True, narrow(name))  # padded on a CPU
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"):
        yield Case(name, 4, False, {"num_key_value_heads": 2})
        yield Case(name, 2, False, {"num_key_value_heads": 1})
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"):
        yield Case(name, 4, True, {"num_key_value_heads": 3, "head_dim": 4})
    for on_cpu in (True, False):
        uneven = {"num_key_value_heads": 6, "intermediate_size": 96, "vocab_size": 70 if on_cpu else 190}
        yield Case("Qwen2ForCausalLM", 3, on_cpu, uneven)
        yield Case("DeepseekV2ForCausalLM", 2, on_cpu, {"q_lora_rank": 12, "first_k_dense_replace": 0})
        yield Case("DeepseekV3ForCausalLM", 2, on_cpu, {"q_lora_rank": None})
        yield Case("DeepseekV3ForCausalLM", 2, on_cpu, dtype="bfloat16")
    yield Case("DeepseekV3ForCausalLM", 3, True)
    yield Case("DeepseekV3ForCausalLM", 2, False, fuses=True)
    for name, changes in SPREAD.items():
        for on_cpu in (True, False):
            yield Case(name, 2, on_cpu, {**changes, **narrow(name)}, ep=2)
            yield Case(name, 4, on_cpu, changes, ep=2)
        yield Case(name, 4, False, changes, ep=4)
    yield Case("DeepseekV3ForCausalLM", 4, True, SPREAD["DeepseekV3ForCausalLM"], "bfloat16", ep=4)


CASES = {str(case): case for case in cases()}


def weights(case: Case, *, seed: int) -> dict[str, Tensor]:
    return checkpoint(architecture(case.name, **case.changes), seed=seed, dtype=getattr(torch, case.dtype))


def boxes_of(case: Case, rank: int) -> list[Placement]:
    arch = architecture(case.name, **case.changes)
    return list(placements(arch, tp=case.tp, rank=rank, on_cpu=case.on_cpu, ep=case.ep))


def order(path: Path, boxes: list[Placement]) -> Tensor:
    """To digest each box as a matrix of its own."""
    asked = [
        [[[home.parameter, home.box] for home in box.homes], 0, 0, box.source[-1][1] - box.source[-1][0]]
        for box in boxes
    ]
    return torch.tensor(list(json.dumps({"path": str(path), "boxes": asked}).encode()), dtype=torch.uint8)


def jobs_of(case: Case, directory: Path) -> list[Job]:
    """The model is loaded twice, at last four tensors at a time in a random order, as a stream may send them."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config(case.name, **case.changes)))
    arch = architecture(case.name, **case.changes)
    first, second = (list(weights(case, seed=seed).items()) for seed in (0, 1))
    random.Random(0).shuffle(second)
    few = [second[start : start + 4] for start in range(0, len(second), 4)]
    calls = [*loadable([first], arch), *loadable(few, arch)]
    return [
        Job(
            case.name,
            str(directory),
            tp=case.tp,
            rank=rank,
            on_cpu=case.on_cpu,
            dtype=case.dtype,
            calls=calls,
            order=order(directory / f"{rank}.json", boxes_of(case, rank)),
            fuses=case.fuses,
            ep=case.ep,
        )
        for rank in range(case.tp)
    ]


@dataclass(frozen=True)
class Loaded:
    """One rank of SGLang's model: its parameters, and what the worker reports of them."""

    parameters: dict[str, Tensor]
    digests: list[int | str]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Loaded]]:
    """By case and rank; one process does all, because importing SGLang takes long."""
    directory = tmp_path_factory.mktemp("sglang")
    jobs = {name: jobs_of(case, directory / str(number)) for number, (name, case) in enumerate(CASES.items())}
    torch.save([job for of_case in jobs.values() for job in of_case], directory / "jobs.pt")
    support = engine_support(
        EngineFindings(cuda=False, sgl_kernel=False, torchvision=True),
        cores=["0"],
        context_length=64,
        max_running_requests=1,
    )
    environment = {
        **os.environ,
        **support.environment,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *support.python_path]),
    }
    program = [sys.executable, str(Path(__file__).with_name("sglang_models.py"))]
    paths = [str(directory / "jobs.pt"), str(directory / "found.pt")]
    done = subprocess.run([*program, *paths], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found = iter(torch.load(directory / "found.pt"))
    return {
        name: [
            Loaded(next(found), json.loads((Path(job.directory) / f"{job.rank}.json").read_text())["answer"])
            for job in of_case
        ]
        for name, of_case in jobs.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_boxes_hold_what_sglang_s_own_loaders_put_there(loaded: dict[str, list[Loaded]], name: str) -> None:
    """Every element of every parameter of every rank, once, apart from padding, which is zero; every tensor is used."""
    case, tensors = CASES[name], weights(CASES[name], seed=1)
    unused = {tensor: torch.ones(value.shape, dtype=torch.bool) for tensor, value in tensors.items()}
    for rank, live in enumerate(part.parameters for part in loaded[name]):
        covered = {parameter: torch.zeros(value.shape, dtype=torch.int) for parameter, value in live.items()}
        for box in boxes_of(case, rank):
            home = next(home for home in box.homes if home.parameter in live)
            index, source = slices(home.box), tensors[box.name][slices(box.source)]
            found = live[home.parameter][index]
            assert torch.equal(found.reshape(source.shape), source) and found.dtype == source.dtype, (rank, box)
            covered[home.parameter][index] += 1
            unused[box.name][slices(box.source)] = False
        for parameter, count in covered.items():
            assert int(count.max()) <= 1, (rank, parameter)
            assert bool((live[parameter][count == 0] == 0).all()), (rank, parameter)
    assert not any(bool(left.any()) for left in unused.values())


@pytest.mark.parametrize("name", CASES)
def test_the_worker_finds_every_box_in_sglang_s_model(loaded: dict[str, list[Loaded]], name: str) -> None:
    """By name or by attribute path; its digests are those of the tensors that were sent."""
    case, tensors = CASES[name], weights(CASES[name], seed=1)
    for rank, part in enumerate(loaded[name]):
        expected = [digest(tensors[box.name][slices(box.source)]) for box in boxes_of(case, rank)]
        assert part.digests == expected
