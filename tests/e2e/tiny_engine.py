"""A tiny random Qwen3, real SGLang engines on it, and what Hugging Face says about the same weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.platform.torchvision_ops import install_torchvision_hook
from rlmegatron.rollout.api import GenerationRequest, SamplingConfig
from rlmegatron.rollout.sglang_engine import EngineSpec, SGLangEngine
from rlmegatron.types import Sample

VOCAB = 32
EOS = 2
LOADER = "engine_test_loader.add_rank_share"
PROMPTS = [(5, 6, 7, 8), (9, 10), (11, 12, 13), (3,)]
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=12)


def tiny_model(seed: int) -> Any:
    install_torchvision_hook()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)  # far from uniform, so that a wrong weight shows
    return model


def hf_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


def logprobs_of(model: Any, prompt: tuple[int, ...], sample: Sample, temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sample.token_ids])).logits[0] / temperature
    table = logits.log_softmax(-1)
    return [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(sample.token_ids)]


def requests(prompts: list[tuple[int, ...]], first_seed: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_id=i, index=0, token_ids=prompt, seed=first_seed + i)
        for i, prompt in enumerate(prompts)
    ]


def publish(engine: SGLangEngine, model: Any, version: int) -> None:
    engine.wake(weights=True, kv_cache=True)
    engine.begin_weight_update()
    tensors = hf_tensors(model)
    engine.update_weights(tensors[:7])
    engine.update_weights(tensors[7:])
    engine.end_weight_update(version=version)


def processes_of_group(group: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def shared_memory_files(group: int) -> list[Path]:
    lines = [line for pid in processes_of_group(group) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [Path("/dev/shm/" + line.split("/dev/shm/")[1]) for line in lines if "/dev/shm/sgl" in line]


def wait_until_gone(group: int, timeout_s: float = 10.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while processes_of_group(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return processes_of_group(group)


def make_engine(directory: Path, log: Path, *, config: RolloutConfig | None = None, **spec: Any) -> SGLangEngine:
    settings: dict[str, Any] = {"model_path": str(directory), "dtype": "fp32", "context_length": 64, "seed": 1, **spec}
    return SGLangEngine(
        EngineSpec(log_path=log, **settings), config or RolloutConfig(startup_timeout_s=180.0, retries=1)
    )
