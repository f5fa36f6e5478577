"""The learner on this rank for one layout, and its distance from a `Reference`.

In: a model directory and a layout. Out: learners, and the largest difference of every compared quantity by name. Runs
in a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import BETAS, CLIP, EPS, LR, TEMPERATURE, Reference, batch_of, policy_loss, value_head, value_loss
from torch import Tensor

from rlmegatron.algorithms.loss_term import LossTerm
from rlmegatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.build import HiddenStatesModel, ValueModel
from rlmegatron.learner.critic import Critic
from rlmegatron.learner.groups import Topology, start_topology
from rlmegatron.learner.model import ShardedModel
from rlmegatron.learner.policy import Policy
from rlmegatron.learner.training import Training
from rlmegatron.models.load import slices
from rlmegatron.models.table import read_architecture

CPU = torch.device("cpu")
NUM_COUNTED = 44.0  # answer tokens of the whole batch: 2 + 3 + ... + 9
MicroBatches = list[list[int]]


@dataclass(frozen=True)
class Layout:
    """How many ranks, how the model is cut over them, and what is recomputed."""

    num_ranks: int
    parallel: dict[str, Any]
    recompute: str = "none"

    def __str__(self) -> str:
        names = {
            "tensor": "tp",
            "pipeline": "pp",
            "virtual_pipeline": "vpp",
            "sequence": "sp",
            "expert": "ep",
            "expert_tensor": "etp",
            "first_stage_layers": "first",
        }
        sizes = [f"{names.get(key, key)}{value:d}" for key, value in self.parallel.items()]
        return "-".join([f"{self.num_ranks}ranks", *sizes, *([] if self.recompute == "none" else [self.recompute])])


def start(layout: Layout) -> Topology:
    return start_topology(ParallelConfig(**layout.parallel), seed=1, timeout_s=60)


def sharded_model(
    kind: type[HiddenStatesModel], directory: str, topology: Topology, *, recompute: str = "none", dtype: str = "fp32"
) -> ShardedModel:
    settings = ModelConfig(path=directory, dtype=dtype, recompute=recompute, logprob_chunk=7, attention_chunk=40)
    model = ShardedModel(kind, read_architecture(directory), settings, topology, CPU)
    model.load(directory)
    return model


def training(model: ShardedModel, *, lr: float = LR, distributed_optimizer: bool = True) -> Training:
    config = OptimizerConfig(lr=lr, betas=BETAS, eps=EPS, clip_grad=CLIP)
    return Training(model, config, num_steps=10, distributed_optimizer=distributed_optimizer)


def policy(directory: str, topology: Topology, *, distributed_optimizer: bool = True, **settings: Any) -> Policy:
    model = sharded_model(HiddenStatesModel, directory, topology, **settings)
    learns = training(model, distributed_optimizer=distributed_optimizer)
    return Policy(model, temperature=TEMPERATURE, training=learns)


def critic(directory: str, topology: Topology, *, distributed_optimizer: bool = True, **settings: Any) -> Critic:
    model = sharded_model(ValueModel, directory, topology, **settings)
    for chunk in model.chunks:
        if hasattr(chunk, "value_head"):
            chunk.value_head.weight.data.copy_(value_head())
    return Critic(model, training(model, distributed_optimizer=distributed_optimizer))


def own_samples(topology: Topology) -> range:
    return range(topology.dp_rank, 8, topology.dp)


def cuts(num_samples: int) -> dict[str, MicroBatches]:
    """Micro-batches of every kind: one sample each, two packed, everything packed beside an empty one."""
    everything = list(range(num_samples))
    return {
        "single": [[number] for number in everything],
        "pairs": [everything[start : start + 2] for start in range(0, num_samples, 2)],
        "whole": [everything, []],
    }


def update_policy(actor: Policy, batch: TrainBatch, micro_batches: MicroBatches) -> float:
    def objective(part: TrainBatch, logp: Tensor, entropy: Tensor) -> LossTerm:
        return LossTerm(policy_loss(part, logp, entropy))

    return actor.update(batch, micro_batches, objective, denominator=NUM_COUNTED).grad_norm


def update_critic(values: Critic, batch: TrainBatch, micro_batches: MicroBatches) -> float:
    def objective(part: TrainBatch, found: Tensor) -> LossTerm:
        return LossTerm(value_loss(part, found))

    return values.update(batch, micro_batches, objective, denominator=NUM_COUNTED).grad_norm


def streamed(model: ShardedModel, *, bytes_per_bucket: int = 1 << 14) -> dict[str, Tensor]:
    """Every Hugging Face tensor of a policy, on every rank."""
    buckets = model.tensor_stream().buckets(bytes_per_bucket=bytes_per_bucket, dtype=torch.float32, receive=True)
    return dict(itertools.chain.from_iterable(buckets))


def distances(directory: str, layout: Layout, reference: Reference) -> dict[str, float]:
    """ "scores/...", "weights/..." and "norm/..." (relative) -> largest difference from the reference on this rank."""
    topology = start(layout)
    batch = batch_of(own_samples(topology))
    mine = rows_of(own_samples(topology))
    found = {}
    for name, micro_batches in cuts(batch.num_sequences).items():
        for key, value in itertools.chain(
            _policy_distances(directory, layout, topology, batch, micro_batches, reference, mine),
            _critic_distances(directory, layout, topology, batch, micro_batches, reference, mine),
        ):
            found[f"{key} {name}"] = value
    return found


def rows_of(samples: range) -> Tensor:
    """Where the tokens of `samples` lie in the batch of all eight."""
    bounds = batch_of(range(8)).cu_seqlens.tolist()
    return torch.cat([torch.arange(bounds[number], bounds[number + 1]) for number in samples])


def _policy_distances(
    directory: str,
    layout: Layout,
    topology: Topology,
    batch: TrainBatch,
    micro_batches: MicroBatches,
    reference: Reference,
    mine: Tensor,
) -> Iterator[tuple[str, float]]:
    actor = policy(directory, topology, recompute=layout.recompute)
    logp, entropy = actor.logprobs(batch, micro_batches)
    yield "scores/logp", largest(logp, reference.logp[mine])
    yield "scores/entropy", largest(entropy, reference.entropy[mine])
    norm = update_policy(actor, batch, micro_batches)
    yield "norm/actor", abs(norm / reference.actor_grad_norm - 1)
    yield "scores/logp after the step", largest(actor.logprobs(batch, micro_batches)[0], reference.logp_after[mine])
    for name, tensor in streamed(actor.model).items():
        yield f"weights/actor {name}", largest(tensor, reference.actor_weights[name])


def _critic_distances(
    directory: str,
    layout: Layout,
    topology: Topology,
    batch: TrainBatch,
    micro_batches: MicroBatches,
    reference: Reference,
    mine: Tensor,
) -> Iterator[tuple[str, float]]:
    values = critic(directory, topology, recompute=layout.recompute)
    yield "scores/values", largest(values.values(batch, micro_batches), reference.values[mine])
    norm = update_critic(values, batch, micro_batches)
    yield "norm/critic", abs(norm / reference.critic_grad_norm - 1)
    yield "scores/values after the step", largest(values.values(batch, micro_batches), reference.values_after[mine])
    for parameter, rule in values.model.parameter_rules():
        size, rank = topology.cut(rule.axis)
        for piece in rule.pieces(size=size, rank=rank):
            expected = reference.critic_weights[piece.name][slices(piece.source)]
            yield f"weights/critic {piece.name}", largest(parameter[slices(piece.target)], expected)
    for chunk in values.model.chunks:
        if isinstance(chunk, ValueModel) and hasattr(chunk, "value_head"):
            expected = reference.critic_weights["value_head.weight"]
            yield "weights/critic value_head", largest(chunk.value_head.weight, expected)


def largest(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, f"{tuple(found.shape)} is compared with {tuple(expected.shape)}"
    return float((found.detach().double() - expected.double()).abs().max())
