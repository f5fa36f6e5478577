"""Memory of one process mapped by another: handles out, tensors in.

In: tensors that own their storage. Out: on a CPU, handles of unnamed shared memory, reached through the owner's open
file and mapped for reading; on a GPU, CUDA's. Nothing is left behind by any way in which a process may end. Must import
neither sglang nor megatron: the engine's workers use it.
"""

from __future__ import annotations

import base64
import mmap
import os
import warnings
from dataclasses import astuple, dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from rlmegatron.rollout.tensor_payload import handle_of


@dataclass(frozen=True, slots=True)
class Handle:
    """One storage of `num_bytes` whose elements are `dtype`: an open file of process `pid`, or what CUDA needs, in
    base64."""

    pid: int
    descriptor: int
    inode: int
    num_bytes: int
    dtype: str
    cuda: str = ""

    def as_json(self) -> list[Any]:
        """What `Handle(*...)` takes."""
        return list(astuple(self))


def export(tensor: Tensor) -> Handle:
    """A handle of the whole storage under a flat tensor; CPU storages are moved to shared memory once, in place.

    A handle of CUDA memory is for one process, and must be opened by it.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_cuda:
        return Handle(os.getpid(), -1, -1, tensor.nbytes, dtype, base64.b64encode(handle_of(tensor)).decode())
    descriptor, num_bytes = tensor.untyped_storage()._share_fd_cpu_()
    return Handle(os.getpid(), descriptor, os.fstat(descriptor).st_ino, num_bytes, dtype)


def open_handle(handle: Handle) -> Tensor:
    """A flat tensor over the owner's memory; OSError where the owner, or its memory, is gone."""
    dtype = getattr(torch, handle.dtype)
    if handle.cuda:
        return _open_cuda(handle.cuda)
    try:
        descriptor = os.open(f"/proc/{handle.pid}/fd/{handle.descriptor}", os.O_RDONLY)
    except OSError as error:
        raise OSError(f"the memory of process {handle.pid} cannot be mapped ({error.strerror}); is it alive?") from None
    try:
        found = os.fstat(descriptor)
        if found.st_ino != handle.inode or found.st_size < handle.num_bytes:
            raise OSError(f"the shared memory of process {handle.pid} has vanished")
        content = mmap.mmap(descriptor, handle.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no tensors that must not be written
        return torch.frombuffer(content, dtype=dtype)


def _open_cuda(handle: str) -> Tensor:
    found: Any = ForkingPickler.loads(base64.b64decode(handle))
    assert isinstance(found, Tensor)
    local = torch.empty(1, dtype=found.dtype, device="cuda")
    local.copy_(found[:1])  # lets this device read the other's memory, which torch does at the first copy
    return found
