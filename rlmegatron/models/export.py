"""A running sharded model as a Hugging Face directory: streamed, sharded, complete or absent.

In: a `TensorStream` and the directory the model came from. Out: the new directory, moved into place when it is whole.
Must never gather the whole model on one rank.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlmegatron.models.stream import TensorStream, shard_files

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")


def export(
    stream: TensorStream,
    *,
    source: str,
    out: Path,
    dtype: torch.dtype,
    writes: bool,
    bytes_per_bucket: int = 1 << 29,
    bytes_per_file: int = 5 * 10**9,
) -> None:
    """Write the model to `out` on the one rank with `writes`; every rank of the stream's group must call.

    An existing `out` is replaced only when the new one is whole. Raises OSError of the file system on the writing rank,
    after it has taken part in the stream to the end, so that no other rank waits for it.
    """
    partial = out.with_name(out.name + ".partial")
    tensors = (
        item
        for bucket in stream.buckets(bytes_per_bucket=bytes_per_bucket, dtype=dtype, receive=writes)
        for item in bucket
    )
    try:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write_weights(stream, tensors, partial, dtype=dtype, bytes_per_file=bytes_per_file)
    finally:
        for _ in tensors:
            pass
    if writes:
        _copy_the_rest(Path(source), partial, dtype)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)


def _write_weights(
    stream: TensorStream, tensors: Iterator[tuple[str, Tensor]], out: Path, *, dtype: torch.dtype, bytes_per_file: int
) -> None:
    files = shard_files(stream.names_and_shapes(), itemsize=dtype.itemsize, max_bytes=bytes_per_file)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        content = dict(next(tensors) for _ in names)
        assert list(content) == names, "the stream and the file plan disagree about the order"
        save_file({name: tensor.cpu().contiguous() for name, tensor in content.items()}, out / file, {"format": "pt"})
        (out / file).chmod(0o666 & ~_umask())  # safetensors makes files that only their owner can read
        weight_map.update(dict.fromkeys(names, file))
        total += sum(tensor.numel() * tensor.itemsize for tensor in content.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_the_rest(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Tokenizer, generation config, chat template and what else lies beside the weights; config.json keeps its keys."""
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(file, out / file.name)
    config = json.loads((source / "config.json").read_text())
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
