"""A checkpoint saved at one layout goes on at another as if nothing had happened: policy and critic, with moments.

What this does not prove: a stop in the middle of a save (see the checkpoint directory's own tests), or GPU formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, cuts, own_samples, policy, sharded_model, start, streamed, update_critic, update_policy
from sharded import critic as build_critic
from tiny_models import BETAS, batch_of

from rlmegatron.checkpoint.tensors import load_tensors, save_tensors
from rlmegatron.config.schema import OptimizerConfig
from rlmegatron.learner.build import HiddenStatesModel
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.policy import Policy
from rlmegatron.learner.training import Training

TP2 = Layout(2, {"tensor": 2})
OTHERS = [
    Layout(1, {}),
    Layout(2, {}),
    Layout(2, {"tensor": 2, "sequence": True}),
    Layout(2, {"pipeline": 2, "virtual_pipeline": 2}),
]
NUM_STEPS = 2


def two_steps(topology: Topology, actor: Any, critic: Any) -> dict[str, Any]:
    batch = batch_of(own_samples(topology))
    micro_batches = cuts(batch.num_sequences)["pairs"]
    norms = [
        (update_policy(actor, batch, micro_batches), update_critic(critic, batch, micro_batches))
        for _ in range(NUM_STEPS)
    ]
    return {"norms": norms, "weights": streamed(actor.model)}


def learn_save_learn(models: str, layout: Layout, out: str) -> dict[str, Any]:
    """Two steps, save, two steps more."""
    topology = start(layout)
    actor, critic = policy(models, topology), build_critic(models, topology)
    two_steps(topology, actor, critic)
    save_tensors(actor.model, actor.training, Path(out) / "actor")
    save_tensors(critic.model, critic.training, Path(out) / "critic")
    return two_steps(topology, actor, critic)


def load_learn(models: str, layout: Layout, saved: str) -> dict[str, Any]:
    """Fresh models, whose weights must all be overwritten; then the two steps."""
    topology = start(layout)
    actor, critic = policy(models, topology), build_critic(models, topology)
    for model in (actor.model, critic.model):
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(torch.nan)
    load_tensors(actor.model, actor.training, Path(saved) / "actor", num_steps=NUM_STEPS)
    load_tensors(critic.model, critic.training, Path(saved) / "critic", num_steps=NUM_STEPS)
    return two_steps(topology, actor, critic)


@pytest.fixture(scope="module")
def saved(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint from TP2, and what TP2 did next."""
    out = tmp_path_factory.mktemp("checkpoint")
    (out / "actor").mkdir()
    (out / "critic").mkdir()
    return out, run_ranks(learn_save_learn, 2, str(models / "Qwen2"), TP2, str(out))[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_a_checkpoint_goes_on_at_another_layout(
    models: Path, saved: tuple[Path, dict[str, Any]], layout: Layout
) -> None:
    directory, expected = saved
    for found in run_ranks(load_learn, layout.num_ranks, str(models / "Qwen2"), layout, str(directory)):
        torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(expected["norms"]), rtol=1e-5, atol=0)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], rtol=0, atol=1e-5, msg=name)


def resumed_rates(models: str, layout: Layout, out: str) -> list[list[float]]:
    """Saved after two of ten steps of a linear decay from 1e-4; the next rates under other settings."""
    topology = start(layout)
    model = sharded_model(HiddenStatesModel, models, topology)
    decaying = OptimizerConfig(lr=1e-4, schedule="linear", betas=BETAS)
    actor = Policy(model, temperature=1.0, training=Training(model, decaying, num_steps=10, distributed_optimizer=True))
    batch = batch_of(own_samples(topology))
    for _ in range(NUM_STEPS):
        update_policy(actor, batch, cuts(batch.num_sequences)["pairs"])
    save_tensors(model, actor.training, Path(out))
    rates = []
    for config, num_steps in ((decaying, 20), (OptimizerConfig(lr=3e-5, betas=BETAS), 10)):
        again = sharded_model(HiddenStatesModel, models, topology)
        trained = Training(again, config, num_steps=num_steps, distributed_optimizer=True)
        load_tensors(again, trained, Path(out), num_steps=NUM_STEPS)
        rates.append([])
        for _ in range(2):
            trained.schedule.step(1)
            rates[-1].append(trained.optimizer.param_groups[0]["lr"])
    return rates


def test_a_resumed_run_follows_the_schedule_of_its_configuration(models: Path, tmp_path: Path) -> None:
    (rates,) = run_ranks(resumed_rates, 1, str(models / "Qwen3"), Layout(1, {}), str(tmp_path))
    assert rates[0] == pytest.approx([1e-4 * (1 - 2 / 20), 1e-4 * (1 - 3 / 20)])
    assert rates[1] == pytest.approx([3e-5, 3e-5])


def tied_round_trip(models: str, layout: Layout, out: str) -> float:
    """Qwen3 ties its embeddings over two stages. The largest change of any parameter by save and load."""
    topology = start(layout)
    actor = policy(models, topology)
    batch = batch_of(own_samples(topology))
    update_policy(actor, batch, cuts(batch.num_sequences)["pairs"])
    save_tensors(actor.model, actor.training, Path(out))
    before = [parameter.detach().clone() for chunk in actor.model.chunks for parameter in chunk.parameters()]
    state = [tensor.detach().clone() for tensor in actor.training.state_tensors()]
    spoil(actor.training)
    load_tensors(actor.model, actor.training, Path(out), num_steps=NUM_STEPS)
    after = [parameter for chunk in actor.model.chunks for parameter in chunk.parameters()]
    pairs = [*zip(before, after, strict=True), *zip(state, actor.training.state_tensors(), strict=True)]
    return max(float((old - new).abs().max()) for old, new in pairs)


def saved_before_the_first_step(models: str, layout: Layout, out: str) -> list[dict[str, Any]]:
    """What two steps make of the weights: undisturbed, after a save, and after a load of what was saved."""
    topology = start(layout)
    found = []
    for mode in ("undisturbed", "saved", "loaded"):
        actor, critic = policy(models, topology), build_critic(models, topology)
        if mode == "saved":
            save_tensors(actor.model, actor.training, Path(out))
        if mode == "loaded":
            load_tensors(actor.model, actor.training, Path(out), num_steps=0)
        found.append(two_steps(topology, actor, critic)["weights"])
    return found


def test_a_checkpoint_from_before_the_first_step_changes_nothing(models: Path, tmp_path: Path) -> None:
    """As in a critic's warm-up, or where no answer was left to learn from."""
    for undisturbed, *others in run_ranks(saved_before_the_first_step, 2, str(models / "Qwen3"), TP2, str(tmp_path)):
        for found in others:
            for name, tensor in undisturbed.items():
                assert tensor.equal(found[name]), name


def spoil(trained: Training) -> None:
    with torch.no_grad():
        for tensor in trained.state_tensors():
            tensor.fill_(torch.nan)


def test_tied_weights_and_optimizer_state_come_back_bit_for_bit(models: Path, tmp_path: Path) -> None:
    layout = Layout(2, {"pipeline": 2})
    assert run_ranks(tied_round_trip, 2, str(models / "Qwen3"), layout, str(tmp_path)) == [0.0, 0.0]
