"""A model's weights from a Megatron distributed checkpoint of any layout.

In: the chunks of this rank and a directory. Out: filled parameters. Collective: every rank of the run calls, and each
reads what it owns. An optimizer's state in the checkpoint is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from rlmegatron.models.dist_checkpoint import check_shapes, read_metadata


def load_dist_checkpoint(chunks: Sequence[Any], directory: str, *, vocab_size: int = 0) -> None:
    """Raises ValueError, on every rank alike, for a checkpoint that is unfinished, broken or of another model.

    `vocab_size` counts the tokens that there are; Megatron fills rows of padding that the checkpoint lacks with 0.
    """
    state = {f"chunk_{number}": _weights(chunk) for number, chunk in enumerate(chunks)}
    _check(directory, list(_shards(state)), vocab_size)
    try:
        loaded = dist_checkpointing.load(state, directory)
    except CheckpointException as failure:  # no Exception, so that nobody would report it
        error, _ = next(iter(failure.failures.values()))
        raise ValueError(f"{directory}: cannot be read: {error}") from None
    for number, chunk in enumerate(chunks):
        _take(chunk, loaded[f"chunk_{number}"])


def _check(directory: str, wanted: list[Any], vocab_size: int) -> None:
    """The stages want different tensors: what one of them misses, all have to hear of."""
    fault = None
    try:
        check_shapes(directory, read_metadata(directory), wanted, vocab_size=vocab_size)
    except (ValueError, OSError) as error:
        fault = str(error)
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for fault in filter(None, faults):
        raise ValueError(fault)


def _weights(chunk: Any) -> dict[str, Any]:
    """Megatron's description without the value head, which no pretrained model has, and without FP8 state."""
    return {
        name: item
        for name, item in chunk.sharded_state_dict().items()
        if not isinstance(item, ShardedObject) and not name.startswith("value_head.")
    }


def _shards(state: dict[str, dict[str, Any]]) -> Iterator[Any]:
    for chunk in state.values():
        for item in chunk.values():
            yield from item.build() if isinstance(item, ShardedTensorFactory) else [item]


def _take(chunk: nn.Module, weights: dict[str, Any]) -> None:
    missing, unexpected = chunk.load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.endswith("_extra_state") and not name.startswith("value_head.")]
    assert not left and not unexpected, f"not loaded: {left}, not in the model: {unexpected}"
