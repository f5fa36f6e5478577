"""A running sharded model as a Hugging Face directory: streamed, sharded, complete or absent.

In: a `TensorStream` and the directory the model came from. Out: the new directory, moved into place when it is whole.
Must never hold more than one bucket of the model beside the rank's own shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.model_files import CONFIG_FILE
from rlmegatron.models.safetensors_writer import SafetensorsWriter, TensorSpec
from rlmegatron.models.stream import TensorStream
from rlmegatron.models.table import read_config

# Weights in any format, with their indexes, and the files of a Megatron checkpoint: none may lie beside new weights.
# fmt: off
_LEFT_BEHIND = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt*", "*.h5",
    "*.h5.index.json", "*.msgpack", "*.msgpack.index.json", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data",
    "*.onnx.data", "*.ot", "*.tflite", "*.npz", "*.nemo", "*.distcp", ".metadata", "metadata.json",
    "latest_checkpointed_iteration.txt",
)
# fmt: on
# Beside files, transformers reads and writes only this; others hold older checkpoints, caches and the like.
_DIRECTORIES = ("additional_chat_templates",)


def export(
    stream: TensorStream,
    arch: Architecture,
    *,
    source: str,
    out: Path,
    dtype: torch.dtype,
    writes: bool,
    bytes_per_bucket: int = 1 << 29,
    bytes_per_file: int = 5 * 10**9,
) -> None:
    """Write the model to `out` on the one rank with `writes`; every rank of the stream's group must call.

    An existing `out` is replaced only when the new one is whole; nothing stays of an export that fails. Raises OSError
    of the file system and ValueError for a bad `source` on the writing rank, after it has taken part in the stream to
    the end, so that no other rank waits for it.
    """
    buckets = stream.buckets(bytes_per_bucket=bytes_per_bucket, dtype=dtype, receive=writes)
    tensors = _one_by_one(buckets)
    partial = out.with_name(out.name + ".partial")
    try:
        if writes:
            _open(partial)
            write_companions(Path(source), partial, arch, dtype)
            _write_weights(partial, stream.tensors(dtype), tensors, bytes_per_file)
            _replace(out, partial)
    finally:
        if writes:  # only after a failure is anything left of it
            shutil.rmtree(partial, ignore_errors=True)
        for _ in tensors:
            pass


def write_companions(
    source: Path, out: Path, arch: Architecture, dtype: torch.dtype, *, added: Mapping[str, Any] | None = None
) -> None:
    """Everything of a Hugging Face directory but its weights, with the config.json of weights in `dtype`.

    `added` are further keys of config.json.
    """
    config = {**exported_config(read_config(str(source)), arch, dtype), **(added or {})}
    copy_companions(source, out)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, out: Path) -> None:
    """Copy what lies beside the weights, but for config.json: tokenizer, generation config, chat templates, code."""
    for file in sorted([*source.iterdir(), *(file for name in _DIRECTORIES for file in source.glob(f"{name}/*"))]):
        if file.is_dir() or file.name == CONFIG_FILE or any(fnmatch(file.name, pattern) for pattern in _LEFT_BEHIND):
            continue
        target = out / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def exported_config(config: Mapping[str, Any], arch: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """`config` with the type of the exported weights and `arch.exported_keys`; every other key as it was."""
    spellings = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    changes = {**dict.fromkeys(spellings, str(dtype).removeprefix("torch.")), **dict(arch.exported_keys)}
    return {key: value for key, value in {**config, **changes}.items() if value is not None or key not in changes}


def _one_by_one(buckets: Iterable[list[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    """Empties each bucket, so that nothing of it stays while the next one is gathered."""
    for bucket in buckets:
        while bucket:
            yield bucket.pop(0)


def _open(partial: Path) -> None:
    """An empty directory, whatever a stopped export has left there."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_weights(
    out: Path, specs: list[TensorSpec], tensors: Iterable[tuple[str, Tensor]], bytes_per_file: int
) -> None:
    writer = SafetensorsWriter(out, specs, bytes_per_file=bytes_per_file)
    writer.create()
    for name, tensor in tensors:
        writer.write(name, tensor)
        del tensor  # or it would stay while the next bucket is gathered
    missing = writer.missing()
    assert not missing, f"the stream ended without {missing[:5]}"
    writer.close()


def _replace(out: Path, partial: Path) -> None:
    """Give the whole directory its name; an older one loses it before it is deleted file by file."""
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
