"""A workspace with a tiny random model, and one run in it that several tests look at."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Workspace

from rlmegatron.config import yaml_text

CONFIG: dict[str, Any] = {
    "name": "unnamed",
    "model": {"path": "model", "dtype": "fp32"},
    "data": {"train": [{"path": "train.jsonl"}], "max_prompt_tokens": 16},
    "actor": {"optimizer": {"lr": 1e-3}},
    "rollout": {
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "context_length": 32,
        "max_total_tokens": 4096,
        "mem_fraction": 0.3,
    },
    "reward": {"name": "user_rewards:small_digits", "workers": 1},
    "train": {"steps": 4, "mini_batches": 2},
    "eval": {"sets": {"test": "test.jsonl"}, "at_start": False},
}


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    directory = tmp_path_factory.mktemp("workspace")
    _write_model(directory / "model")
    from quickstart import problems

    rng = random.Random(7)
    drawn = [
        problems.row(digits) for digits in problems.draw_distinct(rng, problems.VARIANTS["sort5"], 80, held_out=False)
    ]
    rows = [{**row, "number": number} for number, row in enumerate(drawn)]
    made = Workspace(directory)
    made.write_rows("train.jsonl", list(rows[:64]))
    made.write_rows("test.jsonl", list(rows[64:]))
    for module in (Path(__file__).parent / "user_modules").glob("*.py"):
        shutil.copy(module, directory)
    (directory / "run.yaml").write_text(yaml_text.dump(CONFIG))
    return made


@pytest.fixture(scope="session")
def base(workspace: Workspace) -> Path:
    """The run directory of GRPO, four steps, on two data-parallel ranks with an engine each."""
    return workspace.train("base")


@pytest.fixture
def start(workspace: Workspace) -> Iterator[Callable[..., Job]]:
    """`workspace.start`, for tests that act while the job runs; whatever they leave is ended."""
    jobs: list[Job] = []

    def begin(*overrides: str, ranks: int = 2) -> Job:
        jobs.append(workspace.start(*overrides, ranks=ranks))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.stop()


def _write_model(directory: Path) -> None:
    """The quickstart's model with random weights, large ones, so that a wrong one shows in a log-probability."""
    from rlmegatron.platform.torchvision_ops import install_torchvision_hook

    install_torchvision_hook()
    import torch
    from quickstart import tiny_model
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(tiny_model.model_config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.generation_config = tiny_model.generation_config()
    model.save_pretrained(directory)
    tiny_model.build_tokenizer().save_pretrained(directory)
