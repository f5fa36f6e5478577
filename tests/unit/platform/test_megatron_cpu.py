"""megatron-core without CUDA: it alone sees a stand-in for torch; others can notice two methods of tensors."""

from __future__ import annotations

import sys

import pytest
import torch

import rlmegatron.learner  # noqa: F401  # prepares megatron-core
from rlmegatron.platform.megatron_cpu import _AfterImport, prepare_megatron

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device nothing is changed")


def megatron_torch() -> object:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    return rotary_pos_embedding.torch


def test_torch_stays_itself_for_everybody_else() -> None:
    for name in ("arange", "empty", "zeros", "ones", "full", "rand", "randn", "randint"):
        assert getattr(torch, name) is getattr(torch._C._VariableFunctions, name)
    assert sys.modules["torch"] is torch and torch.cuda.current_device.__module__ == "torch.cuda"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_megatron_asks_for_cuda_and_gets_the_cpu() -> None:
    seen = megatron_torch()
    assert seen is not torch
    for factory, args in (("arange", (3,)), ("zeros", (2, 2)), ("tensor", ([1.0],))):
        made = getattr(seen, factory)(*args, device="cuda")
        assert made.device.type == "cpu" and torch.equal(made, getattr(torch, factory)(*args))
    assert seen.empty(1, device="meta").device.type == "meta"  # type: ignore[attr-defined]
    assert seen.cuda.current_device() == torch.device("cpu")  # type: ignore[attr-defined]
    assert seen.nn is torch.nn and seen.float32 is torch.float32  # type: ignore[attr-defined]


def test_modules_imported_later_get_it_too() -> None:
    import megatron.core.models.mamba.mamba_layer_specs  # noqa: F401

    late = [module for name, module in sys.modules.items() if name.startswith("megatron.core")]
    assert late and not [module.__name__ for module in late if getattr(module, "torch", None) is torch]


def test_preparing_twice_changes_nothing() -> None:
    seen, finders, type_of = megatron_torch(), list(sys.meta_path), torch.Tensor.type
    prepare_megatron()
    assert megatron_torch() is seen and sys.meta_path == finders and torch.Tensor.type is type_of
    assert sum(isinstance(finder, _AfterImport) for finder in sys.meta_path) == 1


def test_a_hugging_face_model_has_its_rotary_frequencies(tmp_path: object) -> None:
    """Built and loaded (which goes over the meta device) beside a prepared megatron: base^(-2i / head size)."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    built = Qwen3ForCausalLM(config)
    built.save_pretrained(str(tmp_path))
    expected = torch.tensor([500.0 ** (-2 * i / 8) for i in range(4)])
    for model in (built, AutoModelForCausalLM.from_pretrained(str(tmp_path))):
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)


def test_the_two_methods_of_tensors_still_do_their_work() -> None:
    """`.type()` names CUDA for megatron's optimizer; with an argument it still casts."""
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    tensor = torch.zeros(1)
    assert tensor.cuda() is tensor
