"""A model's weights from a Megatron distributed checkpoint of any layout.

In: the chunks of this rank and a directory. Out: filled parameters. Collective: every rank of the run calls, and each
reads what it owns. An optimizer's state in the checkpoint is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import nn

from rlmegatron.models.dist_checkpoint import check_shapes, read_metadata


def load_dist_checkpoint(chunks: Sequence[Any], directory: str) -> None:
    """Raises ValueError, on every rank alike, for a checkpoint that is unfinished, broken or of another model."""
    metadata = read_metadata(directory)
    state = {f"chunk_{number}": _weights(chunk) for number, chunk in enumerate(chunks)}
    check_shapes(directory, metadata, _shards(state))
    loaded = dist_checkpointing.load(state, directory)
    for number, chunk in enumerate(chunks):
        _take(chunk, loaded[f"chunk_{number}"])


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
