"""The headers of safetensors files, read and made: which tensor has which type, shape and bytes.

In: a path, or tensors to come. Out: entries, or the bytes that a file starts with. Must never read or write the values,
nor import torch (`stored_dtypes.py` has its types). Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

FP8 = "F8_E4M3"
NUM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, FP8: 1}
"""Of one value of each type that weights have, by their names in a header."""

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header; its bytes are [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file says it holds; ValueError names the file where it is not whole."""
    try:
        with FileIO(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if (start + file.read(len(_LFS_POINTER)))[: len(_LFS_POINTER)] == _LFS_POINTER:
                raise ValueError("it is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
            if len(start) < 8 or (length <= _MOST_HEADER_BYTES and size < 8 + length):
                raise ValueError(f"it is truncated: it has {size} bytes and ends before its header does")
            if length > _MOST_HEADER_BYTES:
                raise ValueError("it does not begin with the length of a header")
            file.seek(8)
            return _parse_header(json.loads(file.read(length)), data_start=8 + length, size=size)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # text that is no JSON or no UTF-8 is a ValueError
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from None


def _parse_header(header: Any, *, data_start: int, size: int) -> dict[str, StoredTensor]:
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    found = {name: _parse_entry(name, entry, data_start) for name, entry in header.items()}
    end = data_start
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            raise ValueError(f"its header leaves a gap before {name} or lets it overlap")
        end = tensor.stop
    if size < end:
        raise ValueError(f"it is truncated: it has {size} bytes, its header describes {end}")
    if size > end:
        raise ValueError(f"it has {size} bytes, its header describes {end}")
    return found


def _parse_entry(name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        start, stop = entry["data_offsets"]
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        numbers = [start, stop - start, *shape]
        is_sound = isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in numbers)
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"its header describes {name} as {entry!r}"[:300])
    num_bytes = prod(shape) * NUM_BYTES[dtype] if dtype in NUM_BYTES else stop - start
    if stop - start != num_bytes:
        raise ValueError(f"its header gives {name} {stop - start} bytes, {dtype} {list(shape)} has {num_bytes}")
    return StoredTensor(dtype, shape, data_start + start, data_start + stop)


def make_header(tensors: Mapping[str, StoredTensor]) -> bytes:
    """What a file starts with, in a multiple of 8 bytes; `start` and `stop` of the entries count from its end."""
    entries = {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [tensor.start, tensor.stop]}
        for name, tensor in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
