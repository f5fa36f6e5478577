"""Experts that the engine chose, the balance between experts, and routing biases, against Hugging Face at every layout.

What this does not prove: Transformer Engine's modules, or that an engine's choices are what it says (see tests/e2e).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import write_variant
from forced_routing import NUM_COUNTED, Routed, routed
from ranks import run_ranks
from safetensors.torch import load_file
from sharded import CPU, Layout, MicroBatches, largest, own_samples, rows_of, start, streamed
from tiny_models import TEMPERATURE, batch_of, policy_loss
from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm
from rlmegatron.checkpoint.tensors import load_tensors, save_tensors
from rlmegatron.config.schema import ModelConfig, MoeConfig, OptimizerConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import HiddenStatesModel
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.model import ShardedModel
from rlmegatron.learner.policy import Policy
from rlmegatron.learner.training import StepReport, Training
from rlmegatron.metrics.values import Metric
from rlmegatron.models.table import read_architecture

VARIANTS = ("qwen3-moe", "qwen3-moe-mixed", "mixtral", "deepseek-v3")
COEF, RATE = 0.5, 0.01
LAYOUTS = [Layout(2, {"tensor": 2, "sequence": True}, "full"), Layout(2, {"pipeline": 2}, "full")]
MORE = [
    Layout(1, {}),
    Layout(2, {"expert": 2}, "selective"),
    Layout(2, {"pipeline": 2, "virtual_pipeline": 2}, "full"),
    Layout(4, {"tensor": 2, "expert": 2, "pipeline": 2, "sequence": True}, "full"),
]


Found = list[dict[str, dict[str, Any]]]
"""Of each rank: variant -> what `measure` found."""


def policy(directory: str, topology: Topology, layout: Layout, **moe: Any) -> Policy:
    """Adam's step is g / (1 + |g|) here, from which the gradient can be told."""
    settings = ModelConfig(path=directory, dtype="fp32", recompute=layout.recompute, logprob_chunk=7)
    arch = read_architecture(directory)
    model = ShardedModel(HiddenStatesModel, arch, settings, topology, CPU, moe=MoeConfig(**moe))
    model.load(directory)
    optimizer = OptimizerConfig(lr=1.0, eps=1.0, clip_grad=0.0)
    return Policy(
        model,
        temperature=TEMPERATURE,
        training=Training(model, optimizer, num_steps=10, distributed_optimizer=True),
    )


def step(actor: Policy, batch: TrainBatch, *, learns: bool) -> tuple[StepReport, dict[str, Tensor]]:
    """The report of an optimizer step on unequal micro-batches, one of them empty, and gradients by checkpoint name."""

    def objective(part: TrainBatch, logp: Tensor, entropy: Tensor) -> LossTerm:
        return LossTerm(policy_loss(part, logp, entropy) * learns)

    before = {name: tensor.clone() for name, tensor in streamed(actor.model).items()}
    micro_batches = [[0, 1, 2], [3], list(range(4, batch.num_sequences)), []]
    report = actor.update(batch, micro_batches, objective, denominator=NUM_COUNTED)
    moved = {name: before[name] - tensor for name, tensor in streamed(actor.model).items()}
    return report, {name: step / (1 - step.abs()) for name, step in moved.items()}


def own_choices(model: ShardedModel, batch: TrainBatch, score: Any) -> Tensor:
    """[T L K] int16: what this rank's routers choose for `batch`, the first micro-batch of `score`; -1 elsewhere."""
    assert model.routing is not None
    experts = model.arch.experts
    assert experts is not None
    table = torch.full((batch.num_tokens, len(experts.layers), experts.top_k), -1, dtype=torch.int16)
    for router in model.routing.routers:

        def spy(logits: Tensor, *args: Any, router: Any = router, **named: Any) -> Any:
            weights, chosen = type(router).routing(router, logits, *args, **named)
            if model.topology.sequence_parallel:
                parts = [torch.empty_like(chosen) for _ in range(model.topology.tp)]
                dist.all_gather(parts, chosen, group=model.topology.tp_group)
                whole = torch.cat(parts)
            else:
                whole = chosen
            if (table[0, router.layer] < 0).all():
                table[:, router.layer] = whole[: batch.num_tokens].nonzero()[:, 1].view(-1, experts.top_k).short()
            return weights, chosen

        router.routing = spy  # type: ignore[method-assign]
    score()
    for router in model.routing.routers:
        del router.routing
    return table


def measure(directory: str, layout: Layout) -> dict[str, dict[str, Any]]:
    """Variant -> what this rank finds."""
    topology, expected = start(layout), load_references(directory)
    batch, mine = batch_of(own_samples(topology)), rows_of(own_samples(topology))
    whole: MicroBatches = [list(range(batch.num_sequences)), []]
    found: dict[str, dict[str, Any]] = {}
    for variant, reference in expected.items():
        path = f"{directory}/{variant}"
        actor = policy(path, topology, layout, router_replay=True)
        told = dataclasses.replace(batch, routed_experts=reference.forced[mine].short())
        here: dict[str, Any] = {"logp": largest(actor.logprobs(told, whole)[0], reference.logp[mine])}
        report, gradients = step(actor, told, learns=True)
        here |= {"metrics": report.experts, "gradients": _distance(gradients, reference.gradients)}

        actor = policy(path, topology, layout, aux_loss_coef=COEF)
        free: list[Tensor] = []
        own = own_choices(actor.model, batch, lambda: free.append(actor.logprobs(batch, whole)[0]))  # noqa: B023
        report, gradients = step(actor, batch, learns=False)
        scaled = {name: COEF * gradient for name, gradient in reference.balance_gradients.items()}
        here |= {"balance_metrics": report.experts, "balance_gradients": _distance(gradients, scaled)}

        rate = RATE if "deepseek" in variant else 0.0
        actor = policy(path, topology, layout, router_replay=True, bias_update_rate=rate)
        again = actor.logprobs(dataclasses.replace(batch, routed_experts=own), whole)[0]
        here["same bits"] = torch.equal(again, free[0])
        if rate:
            step(actor, told, learns=True)
            here["biases"] = {name: t for name, t in streamed(actor.model).items() if name.endswith("correction_bias")}
        found[variant] = here
    return found


def biases_after_a_restart(directory: str, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of a policy after a step, and those of a fresh one that loads its checkpoint."""
    topology = start(layout)
    actor, fresh = (policy(f"{directory}/deepseek-v3", topology, layout, bias_update_rate=RATE) for _ in range(2))
    assert actor.training is not None and fresh.training is not None
    step(actor, batch_of(own_samples(topology)), learns=True)
    saved = Path(directory) / "checkpoint"
    saved.mkdir(exist_ok=True)
    dist.barrier()
    save_tensors(actor.model, actor.training, saved)
    load_tensors(fresh.model, fresh.training, saved, num_steps=1)
    before, after = ({name: t.clone() for name, t in streamed(one.model).items()} for one in (actor, fresh))
    names = [name for name in before if name.endswith("correction_bias")]
    return {name: before[name] for name in names}, {name: after[name] for name in names}


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Name -> (largest difference, largest gradient), of parameters."""
    assert found.keys() == expected.keys()
    names = [name for name in found if not name.endswith("correction_bias")]
    return {name: (largest(found[name], expected[name]), float(expected[name].abs().max())) for name in names}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Routed]]:
    directory = str(tmp_path_factory.mktemp("routing"))
    run_ranks(write_and_route, 1, directory)
    return directory, load_references(directory)


def write_and_route(directory: str) -> None:
    for variant in VARIANTS:
        write_variant(Path(directory) / variant, variant)
    torch.save({variant: routed(f"{directory}/{variant}") for variant in VARIANTS}, f"{directory}/references.pt")


def load_references(directory: str) -> dict[str, Routed]:
    """Variant -> what `routed` found; through a file, for a process cannot be started with as many tensors."""
    found: dict[str, Routed] = torch.load(f"{directory}/references.pt", weights_only=False)
    return found


@pytest.fixture(scope="module")
def found_at(references: tuple[str, dict[str, Routed]]) -> Any:
    """Layout -> what each rank measured, once."""
    known: dict[str, Found] = {}

    def measured(layout: Layout) -> Found:
        if str(layout) not in known:
            known[str(layout)] = run_ranks(measure, layout.num_ranks, references[0], layout)
        return known[str(layout)]

    return measured


everywhere = pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE)], ids=str
)


def values(ranks: Found, variant: str, key: str) -> dict[str, float]:
    """The metrics of a step, merged over ranks."""
    merged: dict[str, Metric] = {}
    for rank in ranks:
        for name, metric in rank[variant][key].items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return {final: value for name, metric in merged.items() for final, value in metric.values(name).items()}


def assert_small(ranks: Found, key: str) -> None:
    """Every gradient is off by less than a thousandth of its tensor's largest, and some are not 0."""
    for variant in VARIANTS:
        for rank in ranks:
            too_far = {n: pair for n, pair in rank[variant][key].items() if not pair[0] < 1e-3 * pair[1] + 1e-7}
            assert not too_far, f"{variant}: {too_far}"
        assert max(pair[1] for pair in ranks[0][variant][key].values()) > 1e-3


def loads(chosen: Tensor, num_experts: int) -> Tensor:
    """[L E] tokens of each expert, one by one."""
    load = torch.zeros(chosen.shape[1], num_experts)
    for of_token in chosen.tolist():
        for layer, experts in enumerate(of_token):
            for expert in experts:
                load[layer, expert] += 1
    return load


@everywhere
def test_prescribed_experts_give_the_scores_and_gradients_of_transformers(
    references: Any, found_at: Any, layout: Layout
) -> None:
    ranks = found_at(layout)
    assert max(rank[variant]["logp"] for rank in ranks for variant in VARIANTS) < 1e-4
    assert_small(ranks, "gradients")


@everywhere
def test_prescribing_its_own_choice_changes_no_bit(found_at: Any, layout: Layout) -> None:
    assert all(rank[variant]["same bits"] for rank in found_at(layout) for variant in VARIANTS)


@everywhere
def test_balance_loss_has_the_gradient_of_a_loop_over_sequences(references: Any, found_at: Any, layout: Layout) -> None:
    ranks = found_at(layout)
    assert_small(ranks, "balance_gradients")
    for variant in VARIANTS:
        found = values(ranks, variant, "balance_metrics")["moe/aux_loss"]
        assert found == pytest.approx(references[1][variant].balance, rel=1e-5)


@everywhere
def test_load_and_disagreement_are_counted_token_by_token(references: Any, found_at: Any, layout: Layout) -> None:
    ranks = found_at(layout)
    for variant in VARIANTS:
        reference, found = references[1][variant], values(ranks, variant, "metrics")
        forced, own = reference.forced, reference.own
        load = loads(torch.where(forced < 0, own, forced), 4 if variant == "mixtral" else 8)
        violation = load.amax(1) / load.mean(1) - 1
        assert found["moe/load_max_violation"] == pytest.approx(float(violation.mean()), rel=1e-6)
        assert found["moe/load_max_violation_max"] == pytest.approx(float(violation.max()), rel=1e-6)
        differing = replayed = 0
        for token, by_engine in enumerate(forced.tolist()):
            for layer, experts in enumerate(by_engine):
                replayed += sum(expert >= 0 for expert in experts)
                differing += len(set(experts) - set(own[token, layer].tolist()) - {-1})
        assert found["moe/replay_disagreement"] == pytest.approx(differing / replayed, rel=1e-9)
        assert "moe/aux_loss" not in found


@everywhere
def test_biases_move_against_the_load_of_the_mini_batch(references: Any, found_at: Any, layout: Layout) -> None:
    """What is published has them: the stream. Experts with just the mean load keep theirs."""
    directory, expected = references
    reference = expected["deepseek-v3"]
    load = loads(torch.where(reference.forced < 0, reference.own, reference.forced), 8)
    before = load_file(f"{directory}/deepseek-v3/model.safetensors")
    for rank in found_at(layout):
        biases = rank["deepseek-v3"]["biases"]
        assert len(biases) == 3
        for layer in range(3):
            name = f"model.layers.{layer + 1}.mlp.gate.e_score_correction_bias"
            expected_step = RATE * (load[layer].mean() - load[layer]).sign()
            torch.testing.assert_close(biases[name], before[name] + expected_step, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_a_checkpoint_keeps_the_biases_that_moved(references: Any) -> None:
    directory, _ = references
    before = load_file(f"{directory}/deepseek-v3/model.safetensors")
    for moved, loaded in run_ranks(biases_after_a_restart, 2, directory, Layout(2, {"expert": 2})):
        assert len(moved) == 3 and all(torch.equal(loaded[name], bias) for name, bias in moved.items())
        assert all(not torch.equal(before[name], bias) for name, bias in moved.items())
