"""Everything of this rank that learns or scores: policy, reference and critic on one topology, and where they reside.

In: an architecture and sections of the configuration. Out: `Learner`. Must never know of rewards, engines or the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlmegatron.config.schema import ModelConfig, MoeConfig, OptimizerConfig
from rlmegatron.learner.build import HiddenStatesModel, ValueModel
from rlmegatron.learner.critic import Critic
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.model import ShardedModel
from rlmegatron.learner.policy import Policy
from rlmegatron.learner.residency import HostCopy
from rlmegatron.learner.training import Training, no_grad
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.table import read_architecture


@dataclass
class Learner:
    """The models of this rank; `weights_to_host` and its kin do nothing on a CPU."""

    topology: Topology
    device: torch.device
    actor: Policy
    reference: Policy | None
    critic: Critic | None
    _parts: dict[str, HostCopy] = field(default_factory=dict)

    @property
    def trainings(self) -> dict[str, tuple[ShardedModel, Training]]:
        """What learns, by name."""
        assert self.actor.training is not None
        found = {"actor": (self.actor.model, self.actor.training)}
        if self.critic is not None:
            found["critic"] = (self.critic.model, self.critic.training)
        return found

    def optimizer_to_host(self) -> None:
        """Free optimizer state and gradient buffers, and every model but the policy, which a publish still reads."""
        self._move(("optimizer", "gradients", "others"), to_host=True)

    def weights_to_host(self) -> None:
        """Free the policy's weights too."""
        self._move(("policy",), to_host=True)

    def to_device(self, *, weights_only: bool = False) -> None:
        """Bring the policy's weights back, and unless `weights_only` everything else."""
        self._move(("policy",) if weights_only else ("policy", "others", "gradients", "optimizer"), to_host=False)

    def _move(self, names: tuple[str, ...], *, to_host: bool) -> None:
        if self.device.type == "cpu":
            return
        torch.cuda.synchronize()
        for name in names:
            part = self._part(name)
            if to_host:
                part.to_host()
            else:
                part.to_device()
        if to_host:
            torch.cuda.empty_cache()

    def _part(self, name: str) -> HostCopy:
        if name not in self._parts or (name == "optimizer" and self._parts[name].on_device):
            policy = list(_weights(self.actor.model))
            others = [part.model for part in (self.reference, self.critic) if part is not None]
            other_weights = [tensor for model in others for tensor in _weights(model)]
            if name == "policy":
                self._parts[name] = HostCopy(policy)
            elif name == "others":
                self._parts[name] = HostCopy(other_weights)
            elif name == "gradients":
                grads = [buffer.grad_data for model, _ in self.trainings.values() for buffer in _buffers(model)]
                self._parts[name] = HostCopy(grads, keep=False)
            else:
                state = [tensor for _, training in self.trainings.values() for tensor in training.state_tensors()]
                self._parts[name] = HostCopy(state, without=policy + other_weights)
        return self._parts[name]


def _weights(model: ShardedModel) -> Iterator[Tensor]:
    for chunk in model.chunks:
        yield from chunk.parameters()


def _buffers(model: ShardedModel) -> Iterator[Any]:
    """Megatron's contiguous gradient buffers (not torch's buffers, whose name DDP takes over)."""
    for chunk in model.wrapped:
        yield from chunk.buffers


def build_learner(
    arch: Architecture,
    model: ModelConfig,
    moe: MoeConfig,
    topology: Topology,
    device: torch.device,
    *,
    temperature: float,
    actor_optimizer: OptimizerConfig,
    critic_optimizer: OptimizerConfig | None,
    critic_path: str | None,
    with_reference: bool,
    actor_steps: int,
    critic_steps: int,
    distributed_optimizer: bool,
) -> Learner:
    """Build and load every model; the optimizer steps of the whole run set the length of each decay.

    The model at `critic_path` may have other sizes than the policy, and be a reward model.
    """

    def load(
        kind: type[HiddenStatesModel], path: str, arch: Architecture, moe: MoeConfig | None = None
    ) -> ShardedModel:
        sharded = ShardedModel(kind, arch, model, topology, device, moe=moe)
        sharded.load(path)
        return sharded

    def train(sharded: ShardedModel, optimizer: OptimizerConfig, num_steps: int) -> Training:
        return Training(sharded, optimizer, num_steps=num_steps, distributed_optimizer=distributed_optimizer)

    reference = critic = None
    if with_reference:
        frozen = load(HiddenStatesModel, model.path, arch)
        no_grad(frozen)
        reference = Policy(frozen, temperature=temperature)
    policy = load(HiddenStatesModel, model.path, arch, moe)
    actor = Policy(policy, temperature=temperature, training=train(policy, actor_optimizer, actor_steps))
    if critic_optimizer is not None:
        own = read_architecture(critic_path, for_critic=True) if critic_path else arch
        values = load(ValueModel, critic_path or model.path, own)
        critic = Critic(values, train(values, critic_optimizer, critic_steps))
    return Learner(topology, device, actor, reference, critic)
