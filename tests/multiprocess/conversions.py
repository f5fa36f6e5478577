"""Both converters on the ranks that a test has started, and what of their output can be compared.

In: directories. Out: directories, tensors, and the text of the one error that a user would see. Runs in a rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded import Layout, start
from torch import Tensor

from rlmegatron.conversion import hf_to_mcore, mcore_to_hf
from rlmegatron.conversion.share import Progress
from rlmegatron.distributed.world import RankFailure, World, start_world
from rlmegatron.learner.groups import Topology, stop_topology
from rlmegatron.models.dist_checkpoint import read_metadata


def to_mcore(hf: Path, out: Path, *, dtype: str = "fp32", verify: bool = False) -> str:
    """Convert; what was said on standard error, which for a failure is the report alone."""
    return _said(
        lambda world, topology, say: hf_to_mcore.convert(
            world, topology, hf=hf, out=out, dtype=dtype, verify=verify, say=say
        )
    )


def to_hf(
    mcore: Path, out: Path, *, hf_config: Path | None = None, dtype: str = "fp32", bytes_per_file: int = 1 << 30
) -> str:
    """Convert back; what was said on standard error, which for a failure is the report alone."""
    return _said(
        lambda world, topology, say: mcore_to_hf.convert(
            world,
            topology,
            mcore=mcore,
            hf_config=hf_config or mcore,
            out=out,
            dtype=dtype,
            bytes_per_file=bytes_per_file,
            say=say,
        )
    )


def _said(convert: Callable[[World, Topology, Progress], None]) -> str:
    world, text = start_world(timeout_s=60), io.StringIO()
    topology = start(Layout(world.size, {}))
    try:
        with contextlib.redirect_stderr(text):
            say = Progress(world)
            convert(world, topology, say)
            say.stop()
    except RankFailure as failure:
        return f"FAILED {failure}"
    finally:
        stop_topology()
        dist.barrier()
    return text.getvalue()


def weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory, found through the index where there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(directory / file) for file in set(weight_map.values())}
    assert {name: file for file, found in files.items() for name in found} == weight_map
    return {name: files[file][name] for name, file in weight_map.items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that only one of them has, or whose tensors differ in type, shape or a bit."""
    wrong = found.keys() ^ expected.keys()
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        if one.dtype != other.dtype or not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            wrong.add(name)
    return sorted(wrong)


def contents(checkpoint: Path) -> dict[str, Any]:
    """All that must be the same in two conversions: files byte for byte, but of `.metadata` what it describes."""
    found: dict[str, Any] = {
        str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != ".metadata"
    }
    if (checkpoint / ".metadata").is_file():
        metadata = read_metadata(checkpoint)
        found[".metadata"] = (describe(checkpoint), sorted(map(repr, metadata.storage_data.items())))
    return found


def describe(checkpoint: Path) -> dict[str, Any]:
    """Key -> what a checkpoint says of it, in plain values: kind, type, shape, and the boxes it is stored in."""
    found: dict[str, Any] = {}
    for key, stored in read_metadata(checkpoint).state_dict_metadata.items():
        if not hasattr(stored, "chunks"):
            found[key] = type(stored).__name__
            continue
        boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks)
        found[key] = (str(stored.properties.dtype), tuple(stored.size), boxes)
    return found
