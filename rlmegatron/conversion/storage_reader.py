"""The tensors of a distributed checkpoint read straight into memory that is there, a strip of rows at a time.

In: a directory with its vetted metadata, and torch's plan of what to read. Out: filled tensors. Must never hold a stored
tensor whole: torch's own reader does, and a model's largest is a vocabulary of several GB.
"""

from __future__ import annotations

import os
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

_BYTES_AT_ONCE = 1 << 26


class StorageReader(FileSystemReader):
    """Reads as torch's does, from files that `dist_checkpoint.read_metadata` has found whole."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._directory, self._metadata = directory, metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What was read and vetted before."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, file by file; OSError and ValueError name the file."""
        by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, []).append((stored, item))
        for name, found in by_file.items():
            path = self._directory / name
            with FileIO(path) as file:
                for stored, item in sorted(found, key=lambda pair: pair[0].offset):
                    target = planner.resolve_tensor(item).detach()
                    _read(file, stored, item, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read(file: FileIO, stored: _StorageInfo, item: ReadItem, target: Tensor) -> None:
    """The box of one stored tensor that `item` asks for."""
    like, start = _locate(file, stored)
    corner, lengths, shape = list(item.storage_offsets), list(item.lengths), list(like.shape)
    if any(low + length > size for low, length, size in zip(corner, lengths, shape, strict=True)):
        raise ValueError(f"{file.name}: holds {shape} at byte {stored.offset}, where .metadata says that more is")
    while len(shape) > 1 and shape[0] == 1:  # the layer, and the expert: else a strip were the whole tensor
        del corner[0], lengths[0], shape[0]
    target = target.view(lengths)
    inner = tuple(slice(low, low + length) for low, length in zip(corner[1:], lengths[1:], strict=True))
    row_bytes = prod(shape[1:]) * like.itemsize
    step = min(lengths[0], max(1, _BYTES_AT_ONCE // max(1, row_bytes)))
    rows = torch.empty((step, *shape[1:]), dtype=like.dtype)
    for row in range(0, lengths[0], max(1, step)):
        some = rows[: min(step, lengths[0] - row)]
        _fill(some, file, start + (corner[0] + row) * row_bytes)
        target[row : row + len(some)] = some[(slice(None), *inner)]


def _locate(file: FileIO, stored: _StorageInfo) -> tuple[Tensor, int]:
    """A tensor without memory that is as the stored one, and where in the file that one's first value is."""
    view = _create_file_view(file, stored.offset, stored.length)
    try:
        with FakeTensorMode():
            like = torch.load(view, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive raises nearly anything
        raise ValueError(f"{file.name}: cannot be read at byte {stored.offset}: {error}") from None
    if not isinstance(like, Tensor) or not like.is_contiguous() or stored.transform_descriptors:
        raise ValueError(f"{file.name}: what begins at byte {stored.offset} is no plain tensor")
    offset: int = like.untyped_storage()._checkpoint_offset  # type: ignore[attr-defined]
    return like, stored.offset + offset + like.storage_offset() * like.itemsize


def _fill(tensor: Tensor, file: FileIO, offset: int) -> None:
    buffer, done = tensor.view(-1).view(torch.uint8).numpy().data, 0
    while done < len(buffer):
        try:
            count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.name)) from None
        if count == 0:
            raise ValueError(f"{file.name}: became shorter while it was read")
        done += count
