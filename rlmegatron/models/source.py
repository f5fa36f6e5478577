"""Hugging Face safetensors, read box by box, and everything that can be wrong with a directory of them.

In: a directory. Out: tensors that own their memory; FP8 weights are multiplied by their scales, in fp32. Must never map
a file into memory, where the pages of a whole checkpoint would soon count as this process's, and never communicate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlmegatron.models.file_bytes import read_into
from rlmegatron.models.model_files import INDEX_FILE, SINGLE_FILE
from rlmegatron.models.quantization import SCALE_SUFFIX
from rlmegatron.models.rules import Box, Part
from rlmegatron.models.safetensors_header import FP8, StoredTensor, read_header
from rlmegatron.models.stored_dtypes import DTYPES

_ROTARY_FREQUENCIES = re.compile(r".*\.rotary_emb\.inv_freq")
_BYTES_AT_ONCE = 1 << 24
_MOST_OPEN_FILES = 16


class SafetensorsDirectory:
    """The tensors of one or several safetensors files; `fp8_block` is the block in which FP8 weights have one scale."""

    def __init__(self, directory: str | Path, *, fp8_block: tuple[int, int] | None = None) -> None:
        self.directory, self.fp8_block = Path(directory), fp8_block
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._open_files: dict[str, FileIO] = {}
        index, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        self._files: dict[str, str]
        if index.is_file():
            self._files = _read_index(index)
            if single.is_file() and SINGLE_FILE not in self._files.values():
                raise ValueError(f"{directory}: {INDEX_FILE} does not name {SINGLE_FILE}; remove the one that is old")
        elif single.is_file():
            self._files = dict.fromkeys(self._header(SINGLE_FILE), SINGLE_FILE)
        else:
            raise ValueError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._files)

    def fingerprint(self) -> dict[str, list[int]]:
        """File -> [size, time of its last change in ns]: whether it is still the same directory."""
        stats = {file: (self.directory / file).stat() for file in sorted(set(self._files.values()))}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}

    def check(self) -> None:
        """Read every header; one ValueError names all files that are missing or not whole, and what they lack."""
        held: dict[str, list[str]] = {}
        for name, file in self._files.items():
            held.setdefault(file, []).append(name)
        faults = []
        for file, names in sorted(held.items()):
            try:
                absent = [name for name in names if name not in self._header(file)]
            except ValueError as error:
                faults.append(str(error))
                continue
            if absent:
                faults.append(f"{self.directory / file}: does not hold what {INDEX_FILE} says: {_some(absent)}")
        _raise_all(faults)

    def expect(
        self, parts: Iterable[Part], dropped: Sequence[tuple[str, str]], *, copies: Mapping[str, str] | None = None
    ) -> list[str]:
        """Hold the directory to the tensors that a model needs; what is left out, one line per reason.

        `dropped` are (pattern of names, reason) of what may be there for nothing; `copies` maps names that may be there
        to the needed tensor that they must then equal (a head stored beside tied embeddings). One ValueError names
        every tensor that is missing, of another shape or type, or neither needed nor allowed.
        """
        self.check()
        needed = {part.name: part.shape for part in parts}
        needed |= self._scales_of(needed)
        present = {name: shape for name, shape in needed.items() if name in self}
        faults = [*self._missing(needed), *self._misfits(present)]
        unlisted = self._unlisted()
        others = [name for name in (*self._files, *unlisted) if name not in needed]
        lines, spare = self._sort_out(others, dropped, copies or {})
        if spare:
            shown = _some([f"{name} ({self._files.get(name) or unlisted[name]})" for name in spare])
            faults.append(f"{self.directory}: tensors that this model does not have: {shown}")
        _raise_all(faults)
        return [*lines, *self._confirm_copies(copies or {}, needed)]

    def read(self, name: str, box: Box, shape: tuple[int, ...]) -> Tensor:
        """One box of tensor `name`, whose whole shape must be `shape`: as it is stored, or fp32 where that is FP8."""
        stored = self._stored(name)
        for fault in self._misfits({name: shape}):
            raise ValueError(fault)
        values = self._read_box(name, stored, box)
        return self._dequantize(name, values, box, shape) if stored.dtype == FP8 else values

    def release(self) -> None:
        """Close the files; the next read opens what it needs."""
        while self._open_files:
            self._open_files.popitem()[1].close()

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._files:
            raise ValueError(f"{self.directory}: the checkpoint has no tensor {name}")
        file = self._files[name]
        if name not in self._header(file):
            raise ValueError(f"{self.directory / file}: does not hold what {INDEX_FILE} says: {name}")
        return self._header(file)[name]

    def _header(self, file: str) -> dict[str, StoredTensor]:
        if file not in self._headers:
            self._headers[file] = read_header(self.directory / file)
        return self._headers[file]

    def _missing(self, needed: Iterable[str]) -> Iterable[str]:
        missing = [name for name in needed if name not in self]
        if missing:
            yield f"{self.directory}: the checkpoint has no tensor {_some(missing)}"

    def _misfits(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What stands against reading these tensors with these whole shapes."""
        faults: dict[str, list[str]] = {}
        for name, shape in shapes.items():
            stored = self._stored(name)
            if stored.shape != shape:
                says = f"{name} has shape {list(stored.shape)}, config.json says {list(shape)}"
            elif stored.dtype not in DTYPES:
                says = f"{name} is of type {stored.dtype}; supported: {', '.join(DTYPES)}"
            elif stored.dtype == FP8 and (self.fp8_block is None or len(shape) != 2):
                says = f"{name} is of type {FP8}, which needs quantization_config in config.json and two dimensions"
            else:
                continue
            faults.setdefault(self._files[name], []).append(says)
        return [f"{self.directory / file}: {_some(says, separator='; ')}" for file, says in faults.items()]

    def _unlisted(self) -> dict[str, str]:
        """What files hold and the index does not name: tensor -> file."""
        files = sorted(set(self._files.values()))
        return {name: file for file in files for name in self._header(file) if name not in self._files}

    def _scales_of(self, needed: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {
            name + SCALE_SUFFIX: _num_blocks(shape, self.fp8_block)
            for name, shape in needed.items()
            if self.fp8_block and len(shape) == 2 and name in self and self._stored(name).dtype == FP8
        }

    def _sort_out(
        self, names: Iterable[str], dropped: Sequence[tuple[str, str]], copies: Mapping[str, str]
    ) -> tuple[list[str], list[str]]:
        """What to say of names that may be there for nothing, and the names that may not."""
        reasons = [*((re.compile(pattern), reason) for pattern, reason in dropped)]
        reasons.append((_ROTARY_FREQUENCIES, "rotary frequencies, which follow from config.json"))
        counts, spare = dict.fromkeys((reason for _, reason in reasons), 0), []
        for name in names:
            reason = next((reason for pattern, reason in reasons if pattern.fullmatch(name)), None)
            if reason is not None:
                counts[reason] += 1
            elif name not in copies:
                spare.append(name)
        return [f"left out {_tensors(count)}: {reason}" for reason, count in counts.items() if count], spare

    def _confirm_copies(self, copies: Mapping[str, str], needed: Mapping[str, tuple[int, ...]]) -> list[str]:
        lines = []
        for copy, original in copies.items():
            if copy not in self or copy in needed:
                continue
            if not self._are_equal(copy, original, needed[original]):
                where = self.directory / self._files[copy]
                raise ValueError(f"{where}: {copy} differs from {original}, to which config.json ties it")
            lines.append(f"left out {copy}: it equals {original}")
        return lines

    def _are_equal(self, first: str, second: str, shape: tuple[int, ...]) -> bool:
        if self._stored(first).shape != shape:
            return False
        step = max(1, _BYTES_AT_ONCE // max(1, 4 * prod(shape[1:])))
        inner = tuple((0, size) for size in shape[1:])
        boxes = [((row, min(row + step, shape[0])), *inner) for row in range(0, shape[0], step)]
        return all(torch.equal(self.read(first, box, shape), self.read(second, box, shape)) for box in boxes)

    def _dequantize(self, name: str, values: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
        assert self.fp8_block is not None
        blocks = tuple((low // size, -(-high // size)) for (low, high), size in zip(box, self.fp8_block, strict=True))
        scales = self.read(name + SCALE_SUFFIX, blocks, _num_blocks(shape, self.fp8_block))
        return dequantize(values, scales, corner=(box[0][0], box[1][0]), block=self.fp8_block)

    def _read_box(self, name: str, stored: StoredTensor, box: Box) -> Tensor:
        """Rows come straight from the file; where the box is narrower, whole rows come first, a few at a time."""
        dtype, shape, box = DTYPES[stored.dtype], stored.shape or (1,), box or ((0, 1),)
        assert len(box) == len(shape), f"{name}: a box {box} of a tensor {shape}"
        assert all(0 <= low <= high <= size for (low, high), size in zip(box, shape, strict=True)), f"{name}: {box}"
        (first, last), inner = box[0], tuple(slice(low, high) for low, high in box[1:])
        row_bytes, file = prod(shape[1:]) * dtype.itemsize, self._opened(self._files[name])
        result = torch.empty([high - low for low, high in box], dtype=dtype)
        if result.shape[1:] == shape[1:]:
            read_into(result, file, stored.start + first * row_bytes)
            return result.view(stored.shape) if not stored.shape else result
        step = min(max(1, _BYTES_AT_ONCE // max(1, row_bytes)), last - first)
        rows = torch.empty((step, *shape[1:]), dtype=dtype)
        for row in range(first, last, step or 1):
            some = rows[: min(step, last - row)]
            read_into(some, file, stored.start + row * row_bytes)
            result[row - first : row - first + len(some)] = some[(slice(None), *inner)]
        return result

    def _opened(self, file: str) -> FileIO:
        if file not in self._open_files:
            while len(self._open_files) >= _MOST_OPEN_FILES:
                self._open_files.pop(next(iter(self._open_files))).close()
            self._open_files[file] = FileIO(self.directory / file)
        return self._open_files[file]


def dequantize(values: Tensor, scales: Tensor, *, corner: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Each FP8 value times the scale of its block, in fp32.

    values: [R C], the part of a weight that begins at row and column `corner`. scales: one per block that it touches.
    """
    (top, left), (num_rows, num_columns) = corner, block
    result, scales = values.float(), scales.float()
    column_block = torch.arange(left, left + values.shape[1]) // num_columns - left // num_columns
    for number, scale in enumerate(scales, start=top // num_rows):
        rows = slice(max(0, number * num_rows - top), (number + 1) * num_rows - top)
        result[rows] *= scale[column_block]
    return result


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise ValueError("weight_map must map names of tensors to names of files")
        return found
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as an index of safetensors: {error!r}") from None


def _num_blocks(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, ...]:
    assert block is not None
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def _some(items: Sequence[str], *, separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - 5} more" if len(items) > 5 else ""
    return separator.join(items[:5]) + more


def _tensors(count: int) -> str:
    return f"{count} tensor" + "s" * (count != 1)


def _raise_all(faults: Sequence[str]) -> None:
    if faults:
        raise ValueError("\n".join(faults))
