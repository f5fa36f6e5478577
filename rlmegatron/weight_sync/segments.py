"""The operator that moves weights: it executes a table of segments, each a box copied from a source into a destination.

In: sources, destinations and an int64 table [N 8] whose columns are `COLUMNS`, all in elements; tensors are contiguous
and addressed in the order of their storage. Out: the destinations, changed in place; where dtypes differ, fp32 is
rounded to bf16 (to nearest even). The libraries in csrc/ do the work, on the CPU and on CUDA devices, and torch does
where they were not built. Runs inside an engine's workers too: must never import more than torch and numpy.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
# Elements, dtype and type of device of each tensor of a list.
Sizes = tuple[tuple[int, torch.dtype, str], ...]

COLUMNS = (
    "source",
    "source_offset",
    "source_stride",
    "destination",
    "destination_offset",
    "destination_stride",
    "rows",
    "columns",
)
CSRC = Path(__file__).parent / "csrc"
# As in csrc/segments.h.
INTERFACE = 1
# Bytes of a destination that are handed out together, by type of device. On a CPU a cache line: no two threads write
# to one, and a segment of few bytes counts as what it costs. On a GPU what a warp copies in a few rounds.
TILE_BYTES = {"cpu": 64, "cuda": 8192}

_OPERATOR = "rlmegatron::copy_segments"
_SCHEMA = "(Tensor[] sources, Tensor(a!)[] destinations, Tensor table, Tensor? starts=None) -> ()"


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """A checked table that can be executed any number of times, on tensors of the sizes that it was made for.

    rows: [N 8] and starts: [N+1], the tiles before each segment, lie on the device of the destinations.
    """

    rows: Tensor
    starts: Tensor
    sources: Sizes
    destinations: Sizes
    num_bytes: int

    @classmethod
    def of(cls, table: Ints | Tensor, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> SegmentTable:
        """`num_bytes` are those written. Raises ValueError as `check_segments` does."""
        check_segments(table, sources, destinations)
        device = _device_of(destinations)
        rows = torch.as_tensor(table).to(device).contiguous()
        elements = rows[:, 6] * rows[:, 7]
        items = _items(destinations, device)[rows[:, 3]]
        starts = _count_tiles(elements, items, TILE_BYTES[device.type])
        return cls(rows, starts, _sizes(sources), _sizes(destinations), int((elements * items).sum()))


def copy_segments(table: SegmentTable, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Executes the table; on a CUDA device on the current stream of the destinations' device, without waiting for it.

    Sources may lie on other CUDA devices that the destinations' device has access to. Raises ValueError where a tensor
    differs in elements, dtype or type of device from the one that the table was made for.
    """
    _check_sizes("source", _sizes(sources), table.sources)
    _check_sizes("destination", _sizes(destinations), table.destinations)
    detached = [[tensor.detach() for tensor in tensors] for tensors in (sources, destinations)]
    torch.ops.rlmegatron.copy_segments(*detached, table.rows, table.starts)


def copy_segments_in_torch(table: Tensor, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """What the libraries do, by one copy of torch's for each row of `table` [N 8], which is trusted."""
    for source, offset, stride, destination, to_offset, to_stride, rows, columns in table.tolist():
        given, changed = sources[source].detach(), destinations[destination].detach()
        box = given.as_strided((rows, columns), (stride, 1), given.storage_offset() + offset)
        changed.as_strided((rows, columns), (to_stride, 1), changed.storage_offset() + to_offset).copy_(
            box, non_blocking=True
        )


def is_built(device_type: str) -> bool:
    """Whether the library for "cpu" or "cuda" was built, and by this version's setup.py."""
    return _library(device_type) is not None


def check_segments(table: Ints | Tensor, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Raises ValueError that names the first row of `table` with a box outside its tensors or a pair of dtypes that
    cannot be copied, or the tensor that cannot be addressed. Does not see boxes that overlap in a destination."""
    rows = torch.as_tensor(table).cpu()
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != len(COLUMNS):
        raise ValueError(f"a table of segments is int64 [N {len(COLUMNS)}], got {rows.dtype} {list(rows.shape)}")
    _check_tensors("source", sources)
    _check_tensors("destination", destinations)
    device = _device_of(destinations)
    for number, tensor in enumerate(sources):
        if destinations and tensor.device.type != device.type:
            raise ValueError(f"source {number} is on {tensor.device}, but the destinations are on {device}")
    _raise_first(rows, (rows < 0).any(1), "has a negative number")
    source, destination = rows[:, 0], rows[:, 3]
    _raise_first(rows, source >= len(sources), f"names a source that is none of the {len(sources)}")
    _raise_first(rows, destination >= len(destinations), f"names a destination that is none of {len(destinations)}")
    if not len(rows):
        return
    _check_dtypes(rows, sources, destinations)
    num_elements = [torch.tensor([tensor.numel() for tensor in tensors]) for tensors in (sources, destinations)]
    _raise_first(rows, _is_outside(rows[:, [1, 2, 6, 7]], num_elements[0][source]), "ends outside its source")
    _raise_first(rows, _is_outside(rows[:, [4, 5, 6, 7]], num_elements[1][destination]), "ends outside its destination")
    _raise_first(rows, (rows[:, 6] > 1) & (rows[:, 5] < rows[:, 7]), "has rows that overlap in its destination")


def merge_segments(table: Ints) -> Ints:
    """The same copies in as few segments as joining neighbours gives, ordered by destination; none of them is empty."""
    table = table[(table[:, 6] > 0) & (table[:, 7] > 0)].copy()
    size = -1
    while size != len(table):
        size = len(table)
        table = _join_sides(_join_rows(_fold_rows(table)))
    return table[np.lexsort((table[:, 4], table[:, 3]))]


def _fold_rows(table: Ints) -> Ints:
    """Rows without a gap between them become one; the strides of a single row, which mean nothing, its length."""
    gapless = (table[:, 2] == table[:, 7]) & (table[:, 5] == table[:, 7])
    table[gapless, 7] *= table[gapless, 6]
    table[gapless, 6] = 1
    single = table[:, 6] == 1
    table[single, 2] = table[single, 5] = table[single, 7]
    return table


def _join_sides(table: Ints) -> Ints:
    """Joins segments of as many rows that continue each other's rows."""
    table = table[np.lexsort((table[:, 4], table[:, 6], table[:, 0], table[:, 3]))]
    one, next_one = table[:-1], table[1:]
    alike = (one[:, [0, 3, 6]] == next_one[:, [0, 3, 6]]).all(1)
    strides = (one[:, [2, 5]] == next_one[:, [2, 5]]).all(1) | (one[:, 6] == 1)
    goes_on = (one[:, [1, 4]] + one[:, [7]] == next_one[:, [1, 4]]).all(1)
    return _join(table, alike & strides & goes_on, column=7)


def _join_rows(table: Ints) -> Ints:
    """Joins segments with rows as long and as far apart that continue each other downwards."""
    place = table[:, 4] % np.maximum(table[:, 5], 1)
    order = (table[:, 4], place, table[:, 7], table[:, 5], table[:, 2], table[:, 0], table[:, 3])
    table = table[np.lexsort(order)]
    one, next_one = table[:-1], table[1:]
    alike = (one[:, [0, 2, 3, 5, 7]] == next_one[:, [0, 2, 3, 5, 7]]).all(1)
    goes_on = (one[:, [1, 4]] + one[:, [6]] * one[:, [2, 5]] == next_one[:, [1, 4]]).all(1)
    return _join(table, alike & goes_on, column=6)


def _join(table: Ints, linked: npt.NDArray[np.bool_], *, column: int) -> Ints:
    """Joins each row i + 1 to row i where `linked[i]`, adding up their `column`."""
    if not linked.any():
        return table
    first = np.flatnonzero(np.concatenate([[True], ~linked]))
    joined = table[first]
    joined[:, column] = np.add.reduceat(table[:, column], first)
    return joined


def _sizes(tensors: Sequence[Tensor]) -> Sizes:
    return tuple((tensor.numel(), tensor.dtype, tensor.device.type) for tensor in tensors)


def _check_sizes(kind: str, given: Sizes, wanted: Sizes) -> None:
    if given == wanted:
        return
    if len(given) != len(wanted):
        raise ValueError(f"the table was made for {len(wanted)} {kind} tensors, got {len(given)}")
    number = next(number for number, pair in enumerate(zip(given, wanted, strict=True)) if pair[0] != pair[1])
    got, asked = ("{} elements of {} on {}".format(*sizes[number]) for sizes in (given, wanted))
    raise ValueError(f"{kind} {number} has {got}, but the table was made for {asked}")


def _check_tensors(kind: str, tensors: Sequence[Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            raise ValueError(f"{kind} {number} of shape {list(tensor.shape)} is not contiguous")
        if tensor.device.type not in TILE_BYTES:
            raise ValueError(f"{kind} {number} is on {tensor.device}; segments are copied on cpu and cuda")
        if tensor.element_size() not in (1, 2, 4, 8):
            raise ValueError(f"{kind} {number} is {tensor.dtype}; elements of 1, 2, 4 or 8 bytes can be copied")
        if tensor.data_ptr() % tensor.element_size():
            raise ValueError(f"{kind} {number} does not lie at a multiple of its elements' size")


def _check_dtypes(rows: Tensor, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    numbers: dict[torch.dtype, int] = {}
    given, changed = (
        torch.tensor([numbers.setdefault(tensor.dtype, len(numbers)) for tensor in tensors])
        for tensors in (sources, destinations)
    )
    source, destination = given[rows[:, 0]], changed[rows[:, 3]]
    wide, narrow = numbers.get(torch.float32, -1), numbers.get(torch.bfloat16, -1)
    allowed = (source == destination) | ((source == wide) & (destination == narrow))
    if not allowed.all():
        number = int((~allowed).nonzero()[0])
        pair = sources[int(rows[number, 0])].dtype, destinations[int(rows[number, 3])].dtype
        _raise_first(
            rows, ~allowed, f"goes from {pair[0]} to {pair[1]}; a copy keeps the dtype or rounds float32 to bfloat16"
        )


def _is_outside(boxes: Tensor, num_elements: Tensor) -> Tensor:
    """Whether boxes [N 4] (offset, stride, rows, columns) end after element `num_elements` [N].

    In differences and a quotient, none of which can overflow where those before it hold.
    """
    offset, stride, rows, columns = boxes.unbind(1)
    room = num_elements - offset - columns
    too_long = (offset > num_elements) | (columns > num_elements - offset)
    return too_long | ((rows > 1) & (stride > 0) & (rows - 1 > room // stride.clamp(min=1)))


def _raise_first(rows: Tensor, bad: Tensor, what: str) -> None:
    if bad.any():
        number = int(bad.nonzero()[0])
        numbers = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS, rows[number].tolist(), strict=True))
        raise ValueError(f"segment {number} {what}: {numbers}")


def _device_of(destinations: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in destinations}
    if len(devices) > 1:
        raise ValueError(f"destinations are on one device, got {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")


def _items(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[D] bytes of an element."""
    return torch.tensor([tensor.element_size() for tensor in tensors], dtype=torch.int64, device=device)


def _count_tiles(elements: Tensor, items: Tensor, tile_bytes: int) -> Tensor:
    """Elements [N] of the segments and bytes [N] of an element -> tiles [N+1] before each, and in all."""
    per_tile = tile_bytes // items
    tiles = (elements + per_tile - 1) // per_tile
    return torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])


@cache
def _library(device_type: str) -> ctypes.CDLL | None:
    """Loaded once; None, with a warning that comes once, where it is missing or of another interface."""
    path = CSRC / f"libcopy_segments_{device_type}.so"
    try:
        library = ctypes.CDLL(str(path))
        interface = library.rlmegatron_segments_interface()
    except (OSError, AttributeError) as error:
        _warn_of_torch(device_type, str(error))
        return None
    if interface != INTERFACE:
        _warn_of_torch(device_type, f"{path} has interface {interface}, not {INTERFACE}")
        return None
    if device_type == "cuda":
        library.rlmegatron_segments_error.restype = ctypes.c_char_p
    return library


def _warn_of_torch(device_type: str, reason: str) -> None:
    tool = "nvcc" if device_type == "cuda" else "a C++ compiler"
    warnings.warn(
        f"segments on {device_type} are copied by torch, one by one, because the library for it was not built "
        f"({reason}); install the package again where {tool} is found: "
        "pip install --no-deps --no-build-isolation --editable .",
        stacklevel=2,
    )


def _copy(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], table: Tensor, starts: Tensor | None = None
) -> None:
    """The operator. A table without `starts` is checked and prepared first; with them it is trusted."""
    if starts is None:
        prepared = SegmentTable.of(table, sources, destinations)
        table, starts = prepared.rows, prepared.starts
    if not destinations or not len(table):
        return
    device = destinations[0].device
    library = _library(device.type)
    if library is None:
        copy_segments_in_torch(table, sources, destinations)
        return
    operands = [_operands(tensors, device) for tensors in (sources, destinations)]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*operands, table, starts)]
    counts = ctypes.c_int64(len(table)), ctypes.c_int64(TILE_BYTES[device.type])
    if device.type == "cpu":
        library.rlmegatron_copy_segments_cpu(*pointers, *counts, ctypes.c_int(torch.get_num_threads()))
        return
    stream = torch.cuda.current_stream(device)
    error = library.rlmegatron_copy_segments_cuda(
        *pointers, *counts, ctypes.c_int(stream.device_index), ctypes.c_void_p(stream.cuda_stream)
    )
    if error:
        raise RuntimeError(f"copying segments on {device}: {library.rlmegatron_segments_error(error).decode()}")


def _operands(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """[M 2] address and bytes of an element, where the library reads them."""
    numbers = [(tensor.data_ptr(), tensor.element_size()) for tensor in tensors]
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


torch.library.define(_OPERATOR, _SCHEMA)
torch.library.impl(_OPERATOR, ("cpu", "cuda"), _copy)
torch.library.register_fake(_OPERATOR, lambda sources, destinations, table, starts=None: None)
