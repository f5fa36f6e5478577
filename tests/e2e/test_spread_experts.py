"""Real engines with experts, spread over their ranks or not, against Hugging Face and the layout, box by box.

What this does not prove: anything about a GPU, where other code of SGLang's chooses experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_engine import EOS, PROMPTS, SAMPLING, VOCAB, logprobs_of, make_engine, requests

from rlmegatron.config.schema import RolloutConfig
from rlmegatron.models.load import slices
from rlmegatron.models.table import read_architecture, read_config
from rlmegatron.platform.torchvision_ops import install_torchvision_hook
from rlmegatron.rollout.api import RoutedLayers
from rlmegatron.rollout.sglang_engine import SGLangEngine
from rlmegatron.types import Sample
from rlmegatron.weight_sync.digest import digest
from rlmegatron.weight_sync.engine_config import keys_for_engines
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_loader import loadable
from rlmegatron.weight_sync.engine_orders import ask
from rlmegatron.weight_sync.engine_placement import Placement
from rlmegatron.weight_sync.engine_worker import DIGEST, LOADERS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def qwen() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **sizes))


def deepseek() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "n_routed_experts": 8}
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    groups = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON, **sizes, **heads, **groups))
    torch.nn.init.normal_(model.model.layers[1].mlp.gate.e_score_correction_bias, std=0.3)
    return model


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {key: value for key, value in COMMON.items() if key != "moe_intermediate_size"}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=8))


def save(build: Callable[[], Any], directory: Path) -> Any:
    install_torchvision_hook()
    torch.manual_seed(1)
    model = build().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)  # far from uniform, so that a wrong weight shows
    model.save_pretrained(directory)
    path = str(directory)
    written = read_config(path)
    added = keys_for_engines(written, read_architecture(path), on_cpu=True)
    (directory / "config.json").write_text(json.dumps({**written, **added}))
    return model


def asked(box: Placement) -> list[Any]:
    """To digest a box as a matrix of its own."""
    first, last = box.source[-1]
    return [[[home.parameter, home.box] for home in box.homes], 0, 0, last - first]


def misplaced(engine: SGLangEngine, directory: Path, *, tp: int, ep: int) -> list[str]:
    """The boxes of every rank in which the engine does not have what the file has."""
    arch, tensors = read_architecture(str(directory)), load_file(directory / "model.safetensors")
    ranks = [list(placements(arch, tp=tp, ep=ep, rank=rank, on_cpu=True)) for rank in range(tp)]
    found = ask(engine, DIGEST, [{"boxes": [asked(box) for box in boxes]} for boxes in ranks])
    return [
        f"{box} on rank {rank}: {answer}"
        for rank, (boxes, answers) in enumerate(zip(ranks, found, strict=True))
        for box, answer in zip(boxes, answers, strict=True)
        if answer != digest(tensors[box.name][slices(box.source)])
    ]


def choices_of(model: Any, tokens: tuple[int, ...]) -> list[list[set[int]]]:
    """Token, layer with experts -> the experts that transformers sends it to."""
    found: list[torch.Tensor] = []

    def of_gate(_: Any, __: Any, output: Any) -> None:
        found.append(output[2])

    def of_block(choose: Callable[..., Any]) -> Callable[..., Any]:
        def again(logits: torch.Tensor) -> Any:
            chosen, weights = choose(logits)
            found.append(chosen)
            return chosen, weights

        return again

    hooks = []
    for module in model.modules():
        if type(module).__name__ in ("Qwen3MoeTopKRouter", "MixtralTopKRouter"):
            hooks.append(module.register_forward_hook(of_gate))
        elif type(module).__name__ == "DeepseekV3MoE":
            module.route_tokens_to_experts = of_block(type(module).route_tokens_to_experts.__get__(module))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [[set(experts) for experts in layers] for layers in torch.stack(found, 1).tolist()]


def experts_of(sample: Sample) -> list[list[set[int]]]:
    """Token, layer with experts -> the experts that the engine says it sent the token to."""
    told = sample.routed_experts
    assert told is not None
    table = torch.frombuffer(bytearray(told.data), dtype=torch.int16).view(told.num_tokens, told.num_layers, -1)
    return [[set(experts) for experts in layers] for layers in table.tolist()]


@pytest.mark.parametrize(("build", "tp", "ep"), [(qwen, 4, 2), (deepseek, 2, 2), (mixtral, 1, 1)])
def test_an_engine_with_experts_answers_as_hugging_face_does_and_tells_which_it_chose(
    tmp_path: Path, build: Callable[[], Any], tp: int, ep: int
) -> None:
    directory = tmp_path / "model"
    model = save(build, directory)
    config = RolloutConfig(startup_timeout_s=180.0, retries=1, tensor=tp, expert=ep)
    experts = read_architecture(str(directory)).experts
    assert experts is not None
    routed = RoutedLayers(num_layers=2, layers=experts.layers, top_k=experts.top_k)
    spec = {"custom_weight_loaders": LOADERS, "routed": routed}
    engine = make_engine(directory, tmp_path / "engine.log", config=config, **spec)
    try:
        engine.wake(weights=True, kv_cache=True)
        engine.begin_weight_update()
        tensors = list(load_file(directory / "model.safetensors").items())
        halves = [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]
        for bucket in loadable(halves, read_architecture(str(directory))):
            engine.update_weights(bucket)
        assert misplaced(engine, directory, tp=tp, ep=ep) == []
        engine.end_weight_update(version=1)
        samples = engine.generate(requests(PROMPTS), replace(SAMPLING, routed_experts=True))
        for prompt, sample in zip(PROMPTS, samples, strict=True):
            assert sample.logprobs == pytest.approx(logprobs_of(model, prompt, sample), abs=1e-5)
            # No two experts are closer than the two programs' rounding, or these would differ here and there.
            assert experts_of(sample) == choices_of(model, prompt + sample.token_ids)[:-1]
    finally:
        engine.shutdown()
