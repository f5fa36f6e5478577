"""Runs on other models than a dense one from safetensors: with experts, and from a Megatron checkpoint.

The models are tiny and random: nothing is said about learning.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agreement import assert_engine_and_learner_agree, assert_same_step
from jobs import ROOT, Workspace


def write_deepseek(directory: Path) -> None:
    """DeepSeek-V3 with the quickstart's tokenizer: latent attention, YaRN, a dense layer, experts, a router bias."""
    from rlmegatron.platform.torchvision_ops import install_torchvision_hook

    install_torchvision_hook()
    import torch
    from quickstart import tiny_model
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    dense = tiny_model.model_config()
    torch.manual_seed(5)
    config = DeepseekV3Config(
        **{key: getattr(dense, key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=32,
        max_position_embeddings=128,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
        model.model.layers[1].mlp.gate.e_score_correction_bias.normal_(std=0.3)
    model.generation_config = tiny_model.generation_config()
    model.save_pretrained(directory)
    tiny_model.build_tokenizer().save_pretrained(directory)


@pytest.mark.slow
def test_deepseek_trains_alike_wherever_its_experts_lie(workspace: Workspace) -> None:
    write_deepseek(workspace.path / "experts")
    moe = "moe={router_replay: true, aux_loss_coef: 0.01, bias_update_rate: 0.01}"
    # At this temperature too, engine and learner must mean the same distribution.
    settings = ("model.path=experts", "train.steps=2", "eval.sets={}", "rollout.temperature=0.7", moe)
    spread = workspace.train("experts_spread", *settings, "parallel.expert=2")
    assert_engine_and_learner_agree(spread, (1, 2))
    cut = ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=2")
    cut_run = workspace.train("experts_cut", *settings, *cut)
    assert_engine_and_learner_agree(cut_run, (1, 2))
    assert_same_step(cut_run, spread, 1)


@pytest.mark.slow
def test_a_megatron_checkpoint_trains_as_its_source_does(base: Path, workspace: Workspace) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "convert_hf_to_mcore.py")]
    arguments = ["--hf", "model", "--out", "model_mcore", "--dtype", "fp32", "--verify"]
    subprocess.run([*tool, *arguments], cwd=workspace.path, check=True, timeout=120)
    run = workspace.train("from_mcore", "model.path=model_mcore", "train.steps=1", "parallel.tensor=2", "eval.sets={}")
    assert_engine_and_learner_agree(run, (1,))
    assert_same_step(run, base, 1)
