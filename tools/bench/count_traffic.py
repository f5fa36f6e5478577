"""What a rank receives through torch.distributed, and in how many messages, counted call by call.

In: calls of `torch.distributed.NAME` while the count is open. Out: bytes and messages. Objects (`all_gather_object` and
the like) and whatever goes through a run's `control` group are no weights, and are not counted; nor is `isend` or
`irecv` outside of a batch, whose operations name these functions and must find them unchanged. Must never change what a
call does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Of this rank: what came from other ranks, and the collectives, sends and receives that it took part in."""

    received: int = 0
    messages: int = 0

    def note(self, received: int) -> None:
        """One message."""
        self.received += received
        self.messages += 1


@contextmanager
def counting(control: dist.ProcessGroup | None = None) -> Iterator[Traffic]:
    """Counts until the block ends; one at a time."""
    found = Traffic()
    counters: dict[str, Callable[..., None]] = {
        "all_gather": lambda outputs, own, *_, **__: found.note(_size(outputs) - own.nbytes),
        "all_gather_into_tensor": lambda output, own, *_, **__: found.note(output.nbytes - own.nbytes),
        "broadcast": lambda tensor, src=None, **__: found.note(0 if dist.get_rank() == src else tensor.nbytes),
        "recv": lambda tensor, *_, **__: found.note(tensor.nbytes),
        "send": lambda *_, **__: found.note(0),
        "batch_isend_irecv": lambda operations: _note_batch(found, operations),
    }
    originals = {name: getattr(dist, name) for name in counters}
    for name, count in counters.items():
        setattr(dist, name, _counted(originals[name], count, control))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counted(
    original: Callable[..., Any], count: Callable[..., None], control: dist.ProcessGroup | None
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if control is None or kwargs.get("group") is not control:
            count(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def _note_batch(found: Traffic, operations: Sequence[Any]) -> None:
    """Its operations do not go through `dist` again."""
    for one in operations:
        found.note(one.tensor.nbytes if one.op is dist.irecv else 0)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
