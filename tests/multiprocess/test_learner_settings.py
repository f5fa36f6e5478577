"""Settings reach what they name: rotary scaling, attention buckets, weight decay, schedule, clipping, layouts.

What this does not prove: the long-context behaviour of Llama 3.1's rotary scaling; its frequencies are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, cuts, sharded_model, start, streamed, update_policy
from tiny_models import BETAS, EPS, LR, TEMPERATURE, batch_of, hf_scores, policy_loss, write_models

from rlmegatron.config.schema import OptimizerConfig
from rlmegatron.learner.build import HiddenStatesModel
from rlmegatron.learner.policy import Policy
from rlmegatron.learner.training import Training

ALONE = Layout(1, {})


def policy_with(directory: str, num_steps: int = 10, **optimizer: Any) -> Policy:
    model = sharded_model(HiddenStatesModel, directory, start(ALONE))
    config = OptimizerConfig(lr=LR, betas=BETAS, eps=EPS, **optimizer)
    training = Training(model, config, num_steps=num_steps, distributed_optimizer=True)
    return Policy(model, temperature=TEMPERATURE, training=training)


def rates(directory: str, **optimizer: Any) -> list[float]:
    """Learning rates of twelve steps, planned for ten."""
    actor = policy_with(directory, **optimizer)
    assert actor.training is not None
    found = []
    for _ in range(12):
        actor.training.schedule.step(1)
        found.append(actor.training.optimizer.param_groups[0]["lr"] / LR)
    return found


def all_rates(directory: str, settings: dict[str, Any]) -> list[float]:
    return rates(directory, **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 12),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75] + [1.0] * 9),
        ({"schedule": "linear", "warmup_steps": 20}, [step / 20 for step in range(1, 13)]),
        (
            {"schedule": "linear", "warmup_steps": 3, "min_lr": LR / 5},
            [1 / 3, 2 / 3, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2],
        ),
    ],
    ids=str,
)
def test_learning_rates_follow_the_schedule(models: Path, settings: dict[str, Any], expected: list[float]) -> None:
    assert run_ranks(all_rates, 1, str(models / "Qwen3"), settings)[0] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decay_is_that_of_hugging_face(models: Path, kind: str) -> None:
    """From the full rate in the first of the ten steps; the last one still learns."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=10)
    expected = []
    for _ in range(10):
        expected += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert expected[0] == 1 and expected[-1] > 0.02
    found = run_ranks(all_rates, 1, str(models / "Qwen3"), {"schedule": kind})[0]
    assert found[:10] == pytest.approx(expected)


def decayed(directory: str) -> dict[str, float]:
    """Largest difference from torch's AdamW, by tensor, after one step with a weight decay and without clipping."""
    from transformers import AutoModelForCausalLM

    batch = batch_of(range(8))
    actor = policy_with(directory, weight_decay=100.0, clip_grad=0.0)
    update_policy(actor, batch, cuts(8)["pairs"])
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    groups = [
        {"params": [p for p in hf.parameters() if p.dim() > 1], "weight_decay": 100.0},
        {"params": [p for p in hf.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    (policy_loss(batch, *hf_scores(hf, batch)) / float(batch.loss_mask.sum())).backward()
    optimizer.step()
    weights = hf.state_dict()
    return {name: float((tensor - weights[name]).abs().max()) for name, tensor in streamed(actor.model).items()}


def test_weight_decay_spares_norms_and_biases(models: Path) -> None:
    """Qwen2 has biases; a decay of 100 * lr changes every other weight by a hundredth."""
    found = run_ranks(decayed, 1, str(models / "Qwen2"))[0]
    assert found and max(found.values()) < 1e-5, found


def scaled_rope(directory: str) -> tuple[float, float, float]:
    """(How far the scaling moves a frequency, how far ours are from Hugging Face's, largest log-prob difference.)"""
    from transformers import AutoModelForCausalLM

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_models(Path(directory), rope_parameters=scaling)
    batch = batch_of(range(8))
    actor = policy_with(f"{directory}/Llama")
    hf = AutoModelForCausalLM.from_pretrained(f"{directory}/Llama", dtype=torch.float32)
    theirs = hf.model.rotary_emb.inv_freq
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    ours = actor.model.chunks[0].rotary_pos_emb.inv_freq
    with torch.no_grad():
        logp = hf_scores(hf, batch)[0]
    difference = (actor.logprobs(batch, cuts(8)["whole"])[0] - logp).abs().max()
    return float((plain / theirs).max()), float((ours / theirs - 1).abs().max()), float(difference)


def test_llama_3_rotary_scaling_equals_hugging_face(tmp_path: Path) -> None:
    moved, far, difference = run_ranks(scaled_rope, 1, str(tmp_path))[0]
    assert moved == pytest.approx(8.0, rel=1e-3)
    assert far < 1e-5 and difference < 1e-4


def attention_chunks(directory: str) -> set[int]:
    model = sharded_model(HiddenStatesModel, directory, start(ALONE))
    return {layer.self_attention.core_attention.attention_chunk for layer in model.chunks[0].decoder.layers}


def test_attention_chunk_reaches_every_layer(models: Path) -> None:
    assert run_ranks(attention_chunks, 1, str(models / "Qwen3")) == [{40}]


def layout_error() -> str:
    with pytest.raises(ValueError) as caught:
        start(Layout(3, {"tensor": 2, "pipeline": 1}))
    return str(caught.value)


def test_a_world_that_does_not_fit_is_refused() -> None:
    expected = "parallel: 3 ranks cannot hold tensor 2 x pipeline 1; use a multiple of 2 ranks"
    assert run_ranks(layout_error, 3) == [expected] * 3
