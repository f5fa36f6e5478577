"""Megatron's distributed checkpoints as a source of weights: told from other directories, vetted, read into a model.

In: a directory. Out: filled parameters of a running sharded model, at whatever layout; every rank reads what it owns.
Must never let a checkpoint run code: the pickled `.metadata` may name the classes of such metadata alone.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlmegatron.models.model_files import MEGATRON_CONFIG_FILE, METADATA_FILE

_MODEL = ("embedding.", "decoder.", "output_layer.")

_DCP = "torch.distributed.checkpoint."
_METADATA_CLASSES = (
    "Metadata StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex "
    "TensorProperties _MEM_FORMAT_ENCODING"
)
_PLANNER_CLASSES = "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"
_ALLOWED = {
    *((_DCP + "metadata", name) for name in _METADATA_CLASSES.split()),
    *((_DCP + "planner", name) for name in _PLANNER_CLASSES.split()),
    (_DCP + "filesystem", "_StorageInfo"),
    (_DCP + "filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds checkpoint metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _ALLOWED or _is_dtype(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _enum_member(kind: Any, name: str) -> Any:
    """Newer Pythons pickle a member of an enumeration as an attribute of its class."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}")
    return kind[name]


def read_metadata(directory: str | Path) -> Metadata:
    """The vetted metadata of a whole checkpoint; ValueError names the file that is missing, broken or cut short."""
    path = Path(directory)
    for name in (METADATA_FILE, MEGATRON_CONFIG_FILE):
        if not (path / name).is_file():
            raise ValueError(
                f"{path / name} does not exist: {path} is no Megatron distributed checkpoint, or an unfinished one"
            )
    try:
        with (path / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"{path / METADATA_FILE}: cannot be read as checkpoint metadata: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{path / METADATA_FILE}: holds {type(metadata).__name__}, not checkpoint metadata")
    _check_files(path, metadata.storage_data)
    return metadata


def _check_files(path: Path, storage: Mapping[Any, Any]) -> None:
    ends: dict[str, int] = {}
    for info in storage.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if Path(name).name != name:
            raise ValueError(f"{path / METADATA_FILE}: names the file {name!r}, which is not in the checkpoint")
        if not file.is_file():
            raise ValueError(f"{file} is missing, though {METADATA_FILE} names it")
        if file.stat().st_size < end:
            raise ValueError(
                f"{file} is truncated: it has {file.stat().st_size} bytes, {METADATA_FILE} describes {end}"
            )


def check_shapes(directory: str | Path, metadata: Metadata, wanted: Iterable[Any], *, vocab_size: int) -> None:
    """Hold a checkpoint to Megatron's description of tensors; one ValueError names what is missing or does not fit."""
    faults = []
    for shard in {shard.key: shard for shard in wanted}.values():  # all of a key have one global shape
        stored = metadata.state_dict_metadata.get(shard.key)
        if not isinstance(stored, TensorStorageMetadata):
            faults.append(f"has no tensor {shard.key}")
        elif not _fits(tuple(stored.size), shard, vocab_size):
            faults.append(f"{shard.key} has shape {list(stored.size)}, config.json says {list(shard.global_shape)}")
        elif sum(prod(chunk.sizes) for chunk in stored.chunks) != prod(stored.size):
            faults.append(f"holds {shard.key} in part")
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise ValueError(f"{directory}: {'; '.join(faults[:5])}{more}")


def left_out(directory: str | Path, metadata: Metadata, wanted: Collection[str]) -> list[str]:
    """What a checkpoint holds beside the tensors `wanted`, a line each; ValueError names what belongs to no such model.

    An optimizer's state is expected there, but a decoder's tensor that nobody wants means another model.
    """
    spare = [
        key
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and key not in wanted
    ]
    foreign = [key for key in spare if key.startswith(_MODEL)]
    if foreign:
        more = f" (and {len(foreign) - 5} more)" if len(foreign) > 5 else ""
        raise ValueError(f"{directory}: holds what the model of config.json has not: {', '.join(foreign[:5])}{more}")
    counts = Counter("the optimizer" if "optimizer" in key.split(".") else key.split(".")[0] for key in spare)
    return [f"left out {count} tensor{'s' * (count > 1)} of {name}" for name, count in counts.items()]


def _fits(stored: tuple[int, ...], shard: Any, vocab_size: int) -> bool:
    """A padded vocabulary may have another number of rows, but never fewer than the tokens that there are."""
    if stored == tuple(shard.global_shape):
        return True
    return bool(shard.allow_shape_mismatch) and stored[1:] == tuple(shard.global_shape[1:]) and stored[0] >= vocab_size
