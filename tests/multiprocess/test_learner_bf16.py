"""In bf16 the sharded learner is as far from the exact numbers as Hugging Face in bf16 is.

What this does not prove: convergence; and rounding on a GPU is another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, critic, cuts, own_samples, policy, rows_of, start, update_critic, update_policy
from tiny_models import batch_of, hf_reference


def scores_and_steps(directory: str, layout: Layout) -> dict[str, Any]:
    topology = start(layout)
    samples = own_samples(topology)
    batch, micro_batches = batch_of(samples), cuts(len(samples))["pairs"]
    actor, values = policy(directory, topology, dtype="bf16"), critic(directory, topology, dtype="bf16")
    logp, entropy = actor.logprobs(batch, micro_batches)
    found = {"logp": logp, "entropy": entropy, "values": values.values(batch, micro_batches)}
    norms = {
        "actor_grad_norm": update_policy(actor, batch, micro_batches),
        "critic_grad_norm": update_critic(values, batch, micro_batches),
    }
    types = {parameter.dtype for chunk in actor.model.chunks for parameter in chunk.parameters()}
    return {"scores": found, "norms": norms, "rows": rows_of(samples), "types": types}


def bf16_reference(directory: str) -> Any:
    return hf_reference(directory, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(2, {"tensor": 2, "sequence": True}), Layout(2, {"pipeline": 2}), Layout(2, {})],
    ids=str,
)
def test_bf16_is_as_exact_as_hugging_face_in_bf16(models: Path, references: dict[str, Any], layout: Layout) -> None:
    exact = references["Qwen3"]
    rounded = run_ranks(bf16_reference, 1, str(models / "Qwen3"))[0]
    for result in run_ranks(scores_and_steps, 2, str(models / "Qwen3"), layout):
        assert result["types"] == {torch.bfloat16}
        for name, tensor in result["scores"].items():
            expected = getattr(exact, name)[result["rows"]]
            own_error = float((tensor - expected).square().mean().sqrt())
            usual_error = float((getattr(rounded, name)[result["rows"]].float() - expected).square().mean().sqrt())
            assert 0 < own_error < 2 * usual_error, name
        for name, norm in result["norms"].items():
            assert norm == pytest.approx(getattr(exact, name), rel=0.02), name
