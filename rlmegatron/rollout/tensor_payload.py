"""Packs named tensors so that an engine's ranks can open them: handles to memory, never the data itself.

In: full tensors, or one payload per engine rank. Out: one text payload per engine rank for SGLang's
`update_weights_from_tensor`. Must never import sglang for CPU tensors, whose owner may not be able to.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as torch_mp
from torch import Tensor

ALIGNMENT = 64

NamedValue = tuple[str, Tensor | Sequence[Tensor | bytes]]


def pack_for_ranks(named_values: Sequence[NamedValue], *, num_ranks: int) -> list[str]:
    """One payload per engine rank.

    named_values: a tensor every rank receives, or a sequence of one value per rank: a tensor, or a handle from
    `handle_of` that another process made. CPU tensors outside shared memory are copied there once; CUDA tensors and
    handles are passed as they are, and must stay alive until the engine has answered. Raises ValueError for a sequence
    of another length.
    """
    for name, value in named_values:
        if not isinstance(value, Tensor) and len(value) != num_ranks:
            raise ValueError(f"{name}: {len(value)} payloads for an engine of {num_ranks} ranks")
    rows: list[list[tuple[str, Any]]] = [[] for _ in range(num_ranks)]
    for name, value in named_values:
        for row, part in zip(rows, _parts(value, num_ranks=num_ranks), strict=True):
            row.append((name, part))
    tensors = [part for row in rows for _, part in row if isinstance(part, Tensor)]
    shared = _in_shared_memory(tensors)
    # Opening a handle gives up the reference that pickling took, so every rank needs a pickle of its own.
    return [_text([(name, shared.get(id(part), part)) for name, part in row]) for row in rows]


def handle_of(tensor: Tensor) -> bytes:
    """A handle to one tensor for one rank of an engine, to be sent to the process that calls `pack_for_ranks`."""
    return _pickle(_in_shared_memory([tensor.detach()]).popitem()[1])


def _parts(value: Tensor | Sequence[Tensor | bytes], *, num_ranks: int) -> list[Any]:
    if isinstance(value, Tensor):
        return [value.detach()] * num_ranks
    handles = [part for part in value if isinstance(part, bytes)]
    if handles and torch.cuda.is_available():
        # Device memory that came from another process cannot be handed on: the engine's ranks open the handles.
        from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor

        assert len(handles) == num_ranks, "a sequence holds either handles or tensors"
        return [LocalSerializedTensor(values=handles)] * num_ranks
    return [ForkingPickler.loads(part) if isinstance(part, bytes) else part.detach() for part in value]


def _text(row: Sequence[tuple[str, Any]]) -> str:
    return base64.b64encode(_pickle(list(row))).decode()


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def _in_shared_memory(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """By identity, every tensor as it can be shared; private CPU tensors are copied into one new shared buffer."""
    private = {id(tensor): tensor for tensor in tensors if tensor.device.type == "cpu" and not tensor.is_shared()}
    if any(tensor.is_cuda for tensor in tensors):
        # The engine names devices by their identity, since both sides may number them differently.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    starts, end = {}, 0
    for key, tensor in private.items():
        starts[key] = end
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    shared = {id(tensor): tensor for tensor in tensors}
    if private:
        with _shared_by_name():
            buffer = torch.empty(max(end, ALIGNMENT), dtype=torch.uint8).share_memory_()
        for key, tensor in private.items():
            num_bytes = tensor.numel() * tensor.element_size()
            view = buffer[starts[key] : starts[key] + num_bytes].view(tensor.dtype).view(tensor.shape)
            shared[key] = view.copy_(tensor)
    return shared


@contextmanager
def _shared_by_name() -> Iterator[None]:
    # By name, because passing file descriptors needs a secret that only a process and its children share.
    before = torch_mp.get_sharing_strategy()
    torch_mp.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch_mp.set_sharing_strategy(before)
