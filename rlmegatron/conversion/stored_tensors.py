"""The tensors of a distributed checkpoint read straight into memory that is there, a strip of rows at a time.

In: a directory with its vetted metadata, and torch's plan of what to read. Out: filled tensors. Must never hold a
stored tensor whole: torch's own reader does, and a model's largest is a vocabulary of several GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

from rlmegatron.models.file_bytes import read_into

_BYTES_AT_ONCE = 1 << 26


def read_planned(directory: Path, storage: Mapping[Any, _StorageInfo], plan: LoadPlan, planner: LoadPlanner) -> None:
    """Fill the planner's tensors, file by file in order; OSError and ValueError name the file."""
    by_file: dict[str, list[tuple[_StorageInfo, ReadItem]]] = {}
    for item in plan.items:
        stored = storage[item.storage_index]
        by_file.setdefault(stored.relative_path, []).append((stored, item))
    for name, found in by_file.items():
        with FileIO(directory / name) as file:
            for stored, item in sorted(found, key=lambda pair: pair[0].offset):
                _read(file, stored, item, planner.resolve_tensor(item).detach())


def _read(file: FileIO, stored: _StorageInfo, item: ReadItem, target: Tensor) -> None:
    """The box of one stored tensor that `item` asks for."""
    with FakeTensorMode():
        like = _load(file, stored)
    corner, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if any(low + length > size for low, length, size in zip(corner, lengths, like.shape, strict=True)):
        raise ValueError(f"{file.name}: holds only {list(like.shape)} at byte {stored.offset}")
    if like.is_contiguous():
        offset = like.untyped_storage()._checkpoint_offset
        assert offset is not None, "torch notes it for every tensor that it loads as a fake one"
        start = stored.offset + offset + int(like.storage_offset()) * like.itemsize
        _read_rows(file, start, like, corner, target)
    else:
        target.copy_(narrow_tensor_by_index(_load(file, stored), corner, lengths))


def _read_rows(file: FileIO, start: int, like: Tensor, corner: tuple[int, ...], target: Tensor) -> None:
    """Fill `target` with what begins at `corner` of a tensor as `like`, whose first value is at byte `start`."""
    shape = tuple(like.shape)
    while len(shape) > 1 and shape[0] == 1:  # the layer, and the expert: else a strip were the whole tensor
        corner, shape, target = corner[1:], shape[1:], target.squeeze(0)
    inner = tuple(slice(low, low + length) for low, length in zip(corner[1:], target.shape[1:], strict=True))
    row_bytes = prod(shape[1:]) * like.itemsize
    step = max(1, _BYTES_AT_ONCE // max(1, row_bytes))
    rows = torch.empty((min(step, len(target)), *shape[1:]), dtype=like.dtype)
    for row in range(0, len(target), step):
        some = rows[: len(target) - row]
        read_into(some, file, start + (corner[0] + row) * row_bytes)
        target[row : row + len(some)] = some[(slice(None), *inner)]


def _load(file: FileIO, stored: _StorageInfo) -> Tensor:
    """The stored tensor; among fake ones, one without memory that knows where in the file its values are."""
    try:
        view: Any = _create_file_view(file, stored.offset, stored.length)
        found = torch.load(view, map_location="cpu", weights_only=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from None
    except Exception:  # a broken archive raises nearly anything, and advises to let it run code
        found = None
    if not isinstance(found, Tensor) or stored.transform_descriptors:
        raise ValueError(f"{file.name}: holds no tensor at byte {stored.offset}")
    return found
