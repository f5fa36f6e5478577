"""One optimizer step on models with experts is that of Hugging Face and plain torch, wherever the experts lie.

What this does not prove: the update of a critic with experts, load balancing (there is none), or Transformer Engine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from family_models import load_reference, write_variant
from ranks import run_ranks
from safetensors.torch import load_file
from sharded import (
    Layout,
    largest,
    own_samples,
    policy,
    rows_of,
    sharded_model,
    start,
    streamed,
    training,
    update_policy,
)
from tiny_models import BETAS, CLIP, EPS, LR, batch_of, hf_scores, hf_values, policy_loss
from torch import Tensor, nn

from rlmegatron.learner.build import ValueModel
from rlmegatron.learner.critic import Critic

Trained = dict[str, tuple[Path, tuple[Tensor, float, dict[str, Tensor]]]]
"""Variant -> its directory and what `step_of_torch` made of it."""
VARIANTS = ["qwen3-moe-mixed", "deepseek-v3"]
EP2 = Layout(2, {"expert": 2})
TP2_EP2 = Layout(2, {"tensor": 2, "expert": 2, "sequence": True})
MORE = [
    Layout(1, {}),
    Layout(2, {"tensor": 2, "sequence": True}),
    Layout(2, {"pipeline": 2}),
    Layout(2, {"expert": 2}, "full"),
    Layout(4, {"expert": 2, "pipeline": 2}),
    Layout(4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence": True}),
    Layout(4, {"expert": 2}),
]


def step_of_torch(directory: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    """(log-probs [T] before the step, gradient norm, weights by checkpoint name after it)."""
    model, batch = load_reference(directory), batch_of(range(8))
    logp, entropy = hf_scores(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    (policy_loss(batch, logp, entropy) / float(batch.loss_mask.sum())).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    optimizer.step()
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        return logp.detach(), norm, load_file(f"{out}/model.safetensors")


def step_of_learner(
    directory: str, layout: Layout, expected: tuple[Tensor, float, dict[str, Tensor]]
) -> dict[str, float]:
    """Largest difference of each quantity on this rank."""
    topology = start(layout)
    batch, mine = batch_of(own_samples(topology)), rows_of(own_samples(topology))
    pairs = [list(range(batch.num_sequences))[start : start + 2] for start in range(0, batch.num_sequences, 2)]
    actor = policy(directory, topology, recompute=layout.recompute)
    logp, norm, weights = expected
    found = {"logp": largest(actor.logprobs(batch, pairs)[0], logp[mine])}
    found["norm"] = abs(update_policy(actor, batch, pairs) / norm - 1)
    after = streamed(actor.model)
    assert after.keys() == weights.keys()
    return found | {name: largest(tensor, weights[name]) for name, tensor in after.items()}


def head_of_32() -> Tensor:
    """[1 H]."""
    return torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) * 0.3


def values_of_transformers(directory: str) -> Tensor:
    """[T] of the whole batch, from the body under a linear head."""
    head = nn.Linear(32, 1, bias=False)
    head.weight.data.copy_(head_of_32())
    with torch.no_grad():
        return hf_values(load_reference(directory).model, head, batch_of(range(8)))


def values_of_learner(directory: str, layout: Layout, expected: Tensor) -> float:
    """Largest difference on this rank."""
    topology = start(layout)
    batch, mine = batch_of(own_samples(topology)), rows_of(own_samples(topology))
    model = sharded_model(ValueModel, directory, topology)
    for chunk in model.chunks:
        if hasattr(chunk, "value_head"):
            chunk.value_head.weight.data.copy_(head_of_32())
    return largest(Critic(model, training(model)).values(batch, [list(range(batch.num_sequences))]), expected[mine])


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Variant -> its directory and `step_of_torch`."""
    found = {}
    for variant in VARIANTS:
        directory = tmp_path_factory.mktemp("experts") / variant
        run_ranks(write_variant, 1, directory, variant)
        found[variant] = (directory, run_ranks(step_of_torch, 1, str(directory))[0])
    return found


def assert_same_step(trained: Trained, variant: str, layout: Layout) -> None:
    directory, expected = trained[variant]
    of_ranks = run_ranks(step_of_learner, layout.num_ranks, str(directory), layout, expected)
    limits = {"logp": 1e-4}
    too_far = {name: value for rank in of_ranks for name, value in rank.items() if not value < limits.get(name, 1e-5)}
    assert not too_far, f"{variant} at {layout}: {too_far}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [TP2_EP2], ids=str)
def test_first_step_equals_torch(trained: Trained, variant: str, layout: Layout) -> None:
    assert_same_step(trained, variant, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2_EP2, Layout(4, {"expert": 2, "pipeline": 2})], ids=str)
def test_a_critic_with_experts_values_as_transformers_does(trained: Trained, layout: Layout) -> None:
    directory = str(trained["deepseek-v3"][0])
    expected = run_ranks(values_of_transformers, 1, directory)[0]
    assert float(expected.abs().max()) > 0.1
    assert max(run_ranks(values_of_learner, layout.num_ranks, directory, layout, expected)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [EP2, *MORE], ids=str)
def test_further_layouts_take_the_same_step(trained: Trained, variant: str, layout: Layout) -> None:
    assert_same_step(trained, variant, layout)
