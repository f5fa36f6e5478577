"""What a critic starts from and when it learns alone: reward models give the values that transformers gives.

What this does not prove: anything about CUDA kernels, or reward models of real size.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from family_models import SIZES, VARIANTS
from ranks import run_ranks
from sharded import CPU, Layout, cuts, own_samples, start, training
from tiny_models import batch_of
from torch import Tensor, nn

from rlmegatron.config.schema import ModelConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import ValueModel
from rlmegatron.learner.critic import Critic
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.model import ShardedModel
from rlmegatron.models.table import read_architecture

TOLERANCE = 1e-4
TP2_SP = Layout(2, {"tensor": 2, "sequence": True})
PP2 = Layout(2, {"pipeline": 2})
VPP2 = Layout(2, {"pipeline": 2, "virtual_pipeline": 2})
TP2_EP2 = Layout(2, {"tensor": 2, "expert": 2, "sequence": True})


def write_reward_model(directory: Path, variant: str) -> None:
    """Weights large enough that every one of them matters."""
    import transformers

    family, extra = VARIANTS[variant]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **extra, "num_labels": 1})
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            else:
                tensor.copy_(torch.randn_like(tensor) * (0.3 if name == "score.weight" else 0.12))
    model.save_pretrained(directory)


def scores_of_every_prefix(directory: str, batch: TrainBatch) -> Tensor:
    """[T] what the reward model's own class says of all tokens before each answer token, read to their end."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    assert model.config.pad_token_id is None, "it would not read the last token if that were padding"
    values = torch.zeros(len(batch.tokens))
    for place in batch.loss_mask.nonzero()[:, 0].tolist():
        first = int(batch.cu_seqlens[batch.cu_seqlens <= place].max())
        with torch.no_grad():
            values[place] = model(batch.tokens[None, first:place]).logits[0, 0]
    return values


def critic_of(directory: str, topology: Topology) -> Critic:
    """Every parameter that the checkpoint has must be overwritten, or the values are NaN."""
    settings = ModelConfig(path=directory, dtype="fp32")
    model = ShardedModel(ValueModel, read_architecture(directory, for_critic=True), settings, topology, CPU)
    for tensor, _ in model.parameter_rules():
        nn.init.constant_(tensor, torch.nan)
    model.load(directory)
    return Critic(model, training(model))


def largest_difference(directory: str, variants: list[str], layout: Layout) -> dict[str, tuple[float, float]]:
    """Variant -> (distance from transformers on this rank, how far its values spread)."""
    topology, found = start(layout), {}
    batch = batch_of(own_samples(topology))
    for variant in variants:
        expected = scores_of_every_prefix(f"{directory}/{variant}", batch)
        critic = critic_of(f"{directory}/{variant}", topology)
        values = critic.values(batch, cuts(batch.num_sequences)["pairs"])
        found[variant] = (float((values - expected).abs().max()), float(expected[batch.loss_mask].std()))
    return found


def write_all(directory: Path, variants: list[str]) -> None:
    for variant in variants:
        write_reward_model(directory / variant, variant)


def assert_values_of_transformers(directory: Path, variants: list[str], layout: Layout) -> None:
    run_ranks(write_all, 1, directory, variants)
    for of_rank in run_ranks(largest_difference, layout.num_ranks, str(directory), variants, layout):
        for variant, (difference, spread) in of_rank.items():
            assert difference < TOLERANCE < 1e-2 * spread, (variant, difference, spread)


@pytest.mark.parametrize(("variant", "layout"), [("qwen3", TP2_SP), ("qwen2-tied", PP2)], ids=str)
def test_a_critic_from_a_reward_model_has_its_values(tmp_path: Path, variant: str, layout: Layout) -> None:
    assert_values_of_transformers(tmp_path, [variant], layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [VPP2, TP2_EP2], ids=str)
def test_reward_models_of_other_families_too(tmp_path: Path, layout: Layout) -> None:
    dense, sparse = ["llama", "mistral", "qwen2-yarn", "qwen3"], ["qwen3-moe", "mixtral", "deepseek-v3"]
    assert_values_of_transformers(tmp_path, sparse if layout is TP2_EP2 else [*dense, *sparse], layout)


def values_from_language_model(directory: str) -> tuple[float, bool]:
    """(Largest value, whether the body was filled.)"""
    batch, critic = batch_of(range(8)), critic_of(directory, start(Layout(1, {})))
    filled = all(not tensor.isnan().any() for tensor, _ in critic.model.parameter_rules())
    return float(critic.values(batch, cuts(8)["whole"]).abs().max()), filled


def test_a_critic_from_a_language_model_starts_at_zero(models: Path) -> None:
    assert run_ranks(values_from_language_model, 1, str(models / "Qwen3")) == [(0.0, True)]


def updates_of_steps(warmup_steps: int) -> list[list[str]]:
    """What learns in each of three steps."""
    from rlmegatron.trainer import online

    train, critic = SimpleNamespace(epochs=1, max_kl=None), SimpleNamespace(epochs=None, warmup_steps=warmup_steps)
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(train=train, critic=critic), learner=SimpleNamespace(critic=object()), objectives=None
    )
    log: Any = SimpleNamespace(timer=lambda _: nullcontext(), add=lambda *_, **__: None)
    found: list[list[str]] = []

    def updating(name: str) -> Any:
        return lambda *_, **__: found[-1].append(name) or []

    with patch.multiple(online, update_actor=updating("actor"), update_critic=updating("critic")):
        for step in (1, 2, 3):
            found.append([])
            online._update(run, None, log, step)  # type: ignore[arg-type]
    return found


def updates_of_warmups(warmups: tuple[int, ...]) -> list[list[list[str]]]:
    return [updates_of_steps(warmup_steps) for warmup_steps in warmups]


def test_the_critic_learns_alone_for_the_steps_of_its_warm_up() -> None:
    """Steps are counted over the whole run, so that a resumed one does not warm up again."""
    both = ["critic", "actor"]
    expected = [[both, both, both], [["critic"], ["critic"], both]]
    assert run_ranks(updates_of_warmups, 1, (0, 2)) == [expected]
