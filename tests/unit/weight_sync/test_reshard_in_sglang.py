"""The reshard leaves in SGLang's own classes, bit for bit, what their own loaders leave: every family, many layouts.

Learner, transports and workers are those of a run; ranks and workers are threads. What this does not prove: memory that
crosses processes, for which there are `test_shared_memory.py` and the reshard's test over processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import NAMES
from sglang_models import run_beside_sglang
from sglang_reshard import LATENT, Case, Outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="SGLang's classes are built for the CPU here"),
]

DENSE, EXPERTS = NAMES[:4], NAMES[4:]
BF16, FP32 = ("bfloat16", "bfloat16"), ("float32", "float32")


def case(name: str, layout: str, **options: Any) -> Case:
    """`options` of a `Case`, or else keys of its config.json."""
    own = {key: options.pop(key) for key in Case.__dataclass_fields__.keys() & options.keys()}
    return Case(name, layout, changes=options, **own)


def cases() -> Iterator[Case]:
    for number, name in enumerate(NAMES):
        on_cpu, tied = number % 2 == 0, number % 4 < 2
        yield case(name, "tp8->tp2", on_cpu=on_cpu)
        yield case(name, "tp4->tp1", on_cpu=not on_cpu, dtypes=FP32)
        yield case(name, "tp2->tp4", on_cpu=on_cpu, dtypes=BF16)
        yield case(name, "tp2pp2->tp2", on_cpu=not on_cpu, tie_word_embeddings=tied)
        yield case(name, "tp2pp2vpp2->tp1", on_cpu=on_cpu, tie_word_embeddings=not tied, num_hidden_layers=4)
    for name in EXPERTS:
        yield case(name, "ep4->tp2", on_cpu=name in LATENT)
        yield case(name, "tp2ep2->tp2ep2", on_cpu=name not in LATENT)
        yield case(name, "tp2ep2etp2->tp2ep2", dtypes=BF16)
        yield case(name, "tp4ep2etp2->tp4ep2", on_cpu=False)
    for name in (*DENSE, *EXPERTS[:2]):
        yield case(name, "tp8->tp4", on_cpu=False, num_key_value_heads=2)
        yield case(name, "tp4->tp2", on_cpu=False, num_key_value_heads=1, dtypes=FP32)
    yield from odd_cases()


def odd_cases() -> Iterator[Case]:
    """Padded heads and inner sizes, a size that does not divide the other, engines that differ in number, nodes."""
    padded = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4}
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"):
        narrow = {"moe_intermediate_size": 24} if name in EXPERTS else {"intermediate_size": 40}
        yield case(name, "tp4->tp4", **padded, **narrow)
        yield case(name, "tp2->tp4", num_ranks=8, **padded, **narrow)
    for on_cpu in (True, False):
        thirds = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96}
        yield case("Qwen2ForCausalLM", "tp2->tp3", on_cpu=on_cpu, num_ranks=6, **thirds, vocab_size=190)
        yield case("DeepseekV2ForCausalLM", "tp2->tp2", on_cpu=on_cpu, q_lora_rank=12, first_k_dense_replace=0)
        yield case("DeepseekV3ForCausalLM", "tp4->tp2", on_cpu=on_cpu, q_lora_rank=None)
    yield case("DeepseekV3ForCausalLM", "tp4->tp2", on_cpu=False, fuses=True)
    for name in ("Qwen3ForCausalLM", "MixtralForCausalLM"):
        yield case(name, "tp2->tp1", num_ranks=4)
        yield case(name, "tp2->tp2", num_ranks=4, on_cpu=False)
        yield case(name, "tp4->tp1", per_node=2)
        yield case(name, "tp2pp2->tp2", per_node=2, on_cpu=False)


CASES = {str(one): one for one in cases()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """By case; one process does all, because importing SGLang takes long."""
    directory = tmp_path_factory.mktemp("reshard")
    torch.save(list(CASES.values()), directory / "cases.pt")
    path = directory / "outcomes.json"
    run_beside_sglang(Path(__file__).with_name("sglang_reshard.py"), directory / "cases.pt", path)
    found = [Outcome(**outcome) for outcome in json.loads(path.read_text())]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_reshard_leaves_what_sglang_s_own_loader_leaves(outcomes: dict[str, Outcome], name: str) -> None:
    """Every parameter of every engine rank with its padding, and what SGLang derives from some."""
    found = outcomes[name]
    assert found.unlike == []
    assert all(found.messages.values())
    if CASES[name].family in LATENT:
        assert "model.layers.1.self_attn.w_kc" in found.names and "model.layers.1.self_attn.w_vc" in found.names
