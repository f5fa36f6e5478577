"""Model and optimizer tensors of one trained model, through Megatron's distributed checkpointing.

In: the model's chunks and optimizer. Out: a directory that loads at any layout, or those tensors filled from it. Every
rank calls; each writes and reads its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from rlmegatron.learner.model import ShardedModel
from rlmegatron.learner.training import Training

# The optimizer's shards are described by model tensors, so a checkpoint does not remember TP, PP or DP.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_tensors(model: ShardedModel, training: Training, directory: Path) -> None:
    """Collective; `directory` exists and is empty. An optimizer that has taken no step yet is saved as such."""
    if not any(optimizer.optimizer.state for optimizer in training.optimizer.chained_optimizers):
        _give_every_parameter_state(training)
        _count_no_step(training)
    dist_checkpointing.save(_sharded_state(model, training, is_loading=False), str(directory))


def load_tensors(model: ShardedModel, training: Training, directory: Path, *, num_steps: int) -> None:
    """Collective; weights, main weights, moments and step counts. Rates and decay stay those of the configuration."""
    settings = training.settings()
    _give_every_parameter_state(training)
    state = dist_checkpointing.load(_sharded_state(model, training, is_loading=True), str(directory))
    for number, chunk in enumerate(model.chunks):
        chunk.load_state_dict(state[f"chunk_{number}"], strict=True)
    _take_saved_rates(training, list(_saved_groups(state["optimizer"])))
    with _step_entries_hidden(training):
        training.optimizer.load_state_dict(state["optimizer"])
    _count_steps_separately(training)
    training.resume(settings, num_steps=num_steps)


def _sharded_state(model: ShardedModel, training: Training, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"chunk_{n}": chunk.sharded_state_dict() for n, chunk in enumerate(model.chunks)}
    weights = dict(state)
    state["optimizer"] = training.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_SHARDING)
    return state


def _give_every_parameter_state(training: Training) -> None:
    """Megatron describes the optimizer's state by what is there, and torch's Adam makes it in its first step: take that
    step with zero gradients and no learning rate, which changes nothing."""
    for optimizer in training.optimizer.chained_optimizers:
        inner = optimizer.optimizer
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate
            for parameter in group["params"]:
                parameter.grad = None


def _count_no_step(training: Training) -> None:
    for optimizer in training.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()
            else:  # a fused optimizer, as on a GPU, counts by parameter group
                assert "step" not in state, f"an optimizer counts its steps as {type(state['step'])}"
        for group in optimizer.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0


def _take_saved_rates(training: Training, saved: list[dict[str, Any]]) -> None:
    """From 0.17 on, Megatron knows a saved parameter group by its rates too: lend it the saved ones for the load."""
    for groups in training.parameter_groups():
        for group in groups:
            for other in saved:
                if all(other.get(key) == group.get(key) for key in ("wd_mult", "lr_mult", "is_expert_parallel")):
                    group.update({key: other[key] for key in ("max_lr", "min_lr") if key in other})


def _saved_groups(state: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups in an optimizer's state, however Megatron has nested it."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from value if key == "param_groups" else _saved_groups(value)
    elif isinstance(state, list):
        for value in state:
            yield from _saved_groups(value)


def _count_steps_separately(training: Training) -> None:
    """Megatron gives all parameters one `step` tensor, which torch's Adam then advances once for each of them."""
    for optimizer in training.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


@contextmanager
def _step_entries_hidden(training: Training) -> Iterator[None]:
    """Megatron 0.16 copies every entry of a parameter's state by name and saves none for the `step` of torch's Adam."""
    patched = [o for o in training.optimizer.chained_optimizers if hasattr(o, "_set_main_param_and_optimizer_states")]
    for optimizer in patched:
        optimizer._set_main_param_and_optimizer_states = partial(_set_without_step, optimizer)
    yield
    for optimizer in patched:
        del optimizer._set_main_param_and_optimizer_states


def _set_without_step(optimizer: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
    group, order = optimizer.model_param_group_index_map[model_param]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    step = state.pop("step", None)
    type(optimizer)._set_main_param_and_optimizer_states(optimizer, model_param, tensors)
    if step is not None:
        state["step"] = step
