"""Random tables of segments with their tensors, a slow obvious way to execute them, and the CUDA kernel on the CPU.

The kernel's source is compiled against a stand-in for CUDA that runs each lane in a thread: that shows which element it
puts where and how wide its accesses are, and nothing of speed, of caches or of what nvcc makes of it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlmegatron.weight_sync import segments

Ints = npt.NDArray[np.int64]
Execute = Callable[[Ints, Sequence[Tensor], Sequence[Tensor]], None]

POISON = 0xA5
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PAIRS = [
    (torch.uint8, torch.uint8),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.int64, torch.int64),
    (torch.float32, torch.bfloat16),
]


@dataclass(frozen=True)
class Case:
    """A table and tensors that it fits; destinations are poisoned, and lie with some room around in `buffers`."""

    table: Ints
    sources: list[Tensor]
    destinations: list[Tensor]
    buffers: list[Tensor]

    def poisoned(self) -> Case:
        """The same with destinations of its own."""
        buffers = [buffer.clone() for buffer in self.buffers]
        places = [(tensor.storage_offset(), tensor.numel()) for tensor in self.destinations]
        views = [buffer[start : start + size] for buffer, (start, size) in zip(buffers, places, strict=True)]
        return Case(self.table, self.sources, views, buffers)

    def bits(self) -> list[npt.NDArray[np.generic]]:
        return [bits_of(buffer) for buffer in self.buffers]


def bits_of(tensor: Tensor) -> npt.NDArray[np.generic]:
    """A view of a flat tensor; NaN of bfloat16 become one in a copy, because torch itself makes several of fp32's."""
    if tensor.dtype == torch.bfloat16:
        tensor = torch.where(tensor.isnan(), torch.tensor(float("nan"), dtype=torch.bfloat16), tensor)
    return tensor.view(torch.uint8).numpy().view(BITS[tensor.element_size()])


def random_tensor(size: int, dtype: torch.dtype, random: np.random.Generator) -> Tensor:
    """Any bits: numbers of all sizes, denormals, infinities and NaN."""
    item = torch.empty(0, dtype=dtype).element_size()
    data = random.integers(0, 256, size * item, dtype=np.uint8)
    if dtype == torch.float32 and size:
        special = np.array([0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 1, 0x3F808000, 0x3F818000, 0x7F7FFFFF])
        data.view(np.uint32)[:: max(1, size // 8)] = random.choice(special)
    return torch.from_numpy(data).view(dtype)


@st.composite
def cases(draw: st.DrawFn, most_columns: int = 40, most_segments: int = 12) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs = draw(st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3))
    step = draw(st.sampled_from([1, 1, 2, 4, 8, 16]))
    sizes = [int(size) for size in random.integers(1, 4 * most_columns, len(pairs))]
    sources = [random_tensor(size + 20 * step, pair[0], random) for size, pair in zip(sizes, pairs, strict=True)]
    sources = [source[random.integers(0, 3) * step :] for source in sources]
    rows: list[list[int]] = []
    ends = [0] * len(pairs)
    for _ in range(draw(st.integers(0, most_segments))):
        number = int(random.integers(0, len(pairs)))
        rows += _random_box(random, number, ends, sources[number].numel(), step, most_columns)
    buffers, destinations = [], []
    for (_, dtype), end in zip(pairs, ends, strict=True):
        start = int(random.integers(0, 3)) * step
        buffer = torch.full((end + 2 * start + 64,), POISON, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
        buffers.append(buffer.view(dtype))
        destinations.append(buffers[-1][start : start + end + 8])
    order = random.permutation(len(rows))
    return Case(np.array(rows, dtype=np.int64).reshape(-1, 8)[order], sources, destinations, buffers)


def _random_box(
    random: np.random.Generator, number: int, ends: list[int], size: int, step: int, most_columns: int
) -> list[list[int]]:
    """One or two segments, side by side, behind the last ones of the destination; all numbers multiples of `step`."""
    columns = min(int(random.integers(1, most_columns)) * step, size)
    num_rows = int(random.choice([1, 2, 3, 17]))
    stride = columns + int(random.integers(0, 3)) * step
    start = ends[number] + int(random.integers(0, 3)) * step
    ends[number] = start + (num_rows - 1) * stride + columns
    room = (size - columns) // max(num_rows - 1, 1)
    from_stride = int(random.choice([0, room // step * step, min(columns, room)]))
    left = size - columns - (num_rows - 1) * from_stride
    offset = int(random.integers(0, left // step + 1)) * step
    cut = int(random.integers(0, columns // step + 1)) * step
    return [
        [number, offset + first, from_stride, number, start + first, stride, num_rows, last - first]
        for first, last in ((0, cut), (cut, columns))
        if last > first or random.random() < 0.1
    ]


def copy_slowly(table: Ints, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Element by element, on bits."""
    for source, offset, stride, destination, to_offset, to_stride, num_rows, columns in table.tolist():
        given, changed = (
            tensor.view(torch.uint8).numpy().view(BITS[tensor.element_size()])
            for tensor in (sources[source], destinations[destination])
        )
        for row in range(num_rows):
            for column in range(columns):
                bits = int(given[offset + row * stride + column])
                if given.itemsize != changed.itemsize:
                    bits = round_slowly(bits)
                changed[to_offset + row * to_stride + column] = bits


def round_slowly(bits: int) -> int:
    """The bf16 nearest to a fp32, the even one of two that are as near; a NaN stays one."""
    high, low = bits >> 16, bits & 0xFFFF
    if bits & 0x7FFFFFFF > 0x7F800000:
        return high | 0x40
    return high + (low > 0x8000 or (low == 0x8000 and high % 2 == 1))


def copy_with_library(table: Ints, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    assert segments.is_built("cpu")
    segments.copy_segments(segments.SegmentTable.of(table, sources, destinations), sources, destinations)


def copy_in_torch(table: Ints, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    segments.copy_segments_in_torch(torch.from_numpy(table), sources, destinations)


def compile_kernel(directory: Path) -> Execute:
    """The CUDA kernel on the stand-in."""
    compiler = next(found for found in map(shutil.which, ("c++", "g++", "clang++")) if found)
    output = directory / "kernel.so"
    options = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-w", "-fPIC", "-shared", "-pthread"]
    include = f"-I{Path(__file__).parent / 'cuda_stand_in'}"
    source = segments.CSRC / "copy_segments.cu"
    subprocess.run([compiler, *options, include, "-x", "c++", str(source), "-o", str(output)], check=True)
    library = ctypes.CDLL(str(output))

    def copy(table: Ints, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
        segments.check_segments(table, sources, destinations)
        tile_bytes = segments.TILE_BYTES["cuda"]
        items = np.array([tensor.element_size() for tensor in destinations])[table[:, 3]]
        starts = np.concatenate([[0], np.cumsum(-(-table[:, 6] * table[:, 7] * items // tile_bytes))])
        operands = [
            np.array([(tensor.data_ptr(), tensor.element_size()) for tensor in tensors], dtype=np.int64)
            for tensors in (sources, destinations)
        ]
        arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (*operands, table, starts)]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        counts = ctypes.c_int64(len(table)), ctypes.c_int64(tile_bytes)
        assert library.rlmegatron_copy_segments_cuda(*pointers, *counts, 0, None) == 0

    return copy
