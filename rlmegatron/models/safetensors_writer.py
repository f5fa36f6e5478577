"""Safetensors files written tensor by tensor, in any order and by any number of processes.

In: the names, shapes and types of all tensors, then the tensors. Out: files at their full size from the first moment,
so that a full disk shows before the work is done, byte for byte as the safetensors library writes them. Must never hold
more than the tensor that it is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlmegatron.models.model_files import INDEX_FILE, SINGLE_FILE
from rlmegatron.models.safetensors_header import StoredTensor, make_header
from rlmegatron.models.stored_dtypes import DTYPES

# Wider types come first, so that each tensor lies at a multiple of its type's size; the library's own order.
_ORDER = {"F32": 0, "BF16": 1, "F16": 2}
_NAMES = {DTYPES[name]: name for name in _ORDER}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    header: bytes
    tensors: dict[str, StoredTensor]
    size: int


class SafetensorsWriter:
    """The files of one checkpoint: one process calls `create`, others `open`; each writes what it has, then `close`s.

    Files hold at most `bytes_per_file` bytes of values, in the order of `tensors` (one larger tensor has its own file).
    OSErrors say which file cannot be written.
    """

    def __init__(self, directory: Path, tensors: Sequence[TensorSpec], *, bytes_per_file: int = 5 * 10**9) -> None:
        self.directory = directory
        self._specs = {spec.name: spec for spec in tensors}
        assert len(self._specs) == len(tensors) > 0, "tensors must have names of their own"
        files = _cut(tensors, bytes_per_file)
        names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
        self._files = [_plan(*file) for file in zip(names if len(files) > 1 else [SINGLE_FILE], files, strict=True)]
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self._handles: dict[str, FileIO] = {}
        self._written: set[str] = set()

    def create(self) -> None:
        """Reserve every file at its full size and write headers and index; on failure nothing of it stays."""
        made: list[Path] = []
        try:
            for file in self._files:
                path = self.directory / file.name
                with self._explaining(path, file.size), FileIO(path, "xb") as handle:
                    made.append(path)
                    os.posix_fallocate(handle.fileno(), 0, file.size)
                    _write_at(handle, memoryview(file.header), 0)
            if len(self._files) > 1:
                path = self.directory / INDEX_FILE
                made.append(path)
                with self._explaining(path, len(self._index())):
                    path.write_bytes(self._index())
        except OSError:
            for path in made:
                path.unlink(missing_ok=True)
            raise

    def open(self) -> None:
        """Go on with files that are there; ValueError names one that is not of this plan."""
        for file in self._files:
            if not _is_of(self.directory / file.name, file):
                raise ValueError(f"{self.directory / file.name}: is not as it was planned; write the checkpoint anew")
        index = self.directory / INDEX_FILE
        found = index.read_bytes() if index.is_file() else None
        if found != (self._index() if len(self._files) > 1 else None):
            raise ValueError(f"{index}: is not as it was planned; write the checkpoint anew")

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one whole tensor, of any type and device, at its place; once more if it is there already."""
        assert name in self._specs, f"{name} was not announced"
        spec, file = self._specs[name], self._file_of[name]
        assert tuple(tensor.shape) == spec.shape, f"{name} is {list(tensor.shape)}, announced as {list(spec.shape)}"
        values = tensor.detach().to(device="cpu", dtype=spec.dtype).reshape(-1)
        path = self.directory / file.name
        with self._explaining(path, file.size):
            if file.name not in self._handles:
                self._handles[file.name] = FileIO(path, "r+b")
            offset = len(file.header) + file.tensors[name].start
            _write_at(self._handles[file.name], values.view(torch.uint8).numpy().data, offset)
        self._written.add(name)

    def missing(self) -> list[str]:
        """What this object has not written."""
        return [name for name in self._specs if name not in self._written]

    def close(self) -> None:
        """Wait until everything that this object has written is on the disk."""
        sizes = {file.name: file.size for file in self._files}
        while self._handles:
            name, handle = self._handles.popitem()
            with self._explaining(self.directory / name, sizes[name]), handle:
                os.fsync(handle.fileno())

    def _index(self) -> bytes:
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for spec in self._specs.values())},
            "weight_map": {name: self._file_of[name].name for name in self._specs},
        }
        return (json.dumps(index, indent=2) + "\n").encode()

    @contextmanager
    def _explaining(self, path: Path, needs: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            total = sum(file.size for file in self._files)
            share = f"{needs} bytes" if len(self._files) == 1 else f"{needs} bytes of {total} for all files"
            raise OSError(error.errno, f"cannot write {path}: {error.strerror}; it needs {share}") from error


def _cut(tensors: Sequence[TensorSpec], bytes_per_file: int) -> list[list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in tensors:
        if files[-1] and filled + spec.num_bytes > bytes_per_file:
            files.append([])
            filled = 0
        files[-1].append(spec)
        filled += spec.num_bytes
    return files


def _plan(name: str, specs: Sequence[TensorSpec]) -> _File:
    tensors, end = {}, 0
    for spec in sorted(specs, key=lambda spec: (_ORDER[_NAMES[spec.dtype]], spec.name)):
        tensors[spec.name] = StoredTensor(_NAMES[spec.dtype], spec.shape, end, end + spec.num_bytes)
        end += spec.num_bytes
    header = make_header(tensors)
    return _File(name, header, tensors, len(header) + end)


def _is_of(path: Path, file: _File) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as found:
        return found.read(len(file.header)) == file.header


def _write_at(handle: FileIO, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):  # the kernel takes at most 2 GiB at once
        done += os.pwrite(handle.fileno(), data[done:], offset + done)
