"""Stored tensors are read as torch reads them, whatever their box, strides and types, in strips of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import contents, to_hf, to_mcore
from family_models import write_variant
from ranks import run_ranks
from torch import Tensor

BOXES = [
    ((0, 0, 0), (1, 7, 6)),
    ((0, 2, 0), (1, 4, 6)),
    ((0, 1, 3), (1, 6, 2)),
    ((0, 6, 5), (1, 1, 1)),
    ((0, 3, 0), (1, 0, 6)),
]


def boxes_read(directory: Path, bytes_at_once: int) -> list[str]:
    """What is not read as it was saved: of a plain tensor, a transposed one, and a slice of a longer storage."""
    from rlmegatron.conversion import stored_tensors

    stored_tensors._BYTES_AT_ONCE = bytes_at_once
    whole = torch.arange(42.0).view(1, 7, 6)
    kinds = {
        "plain": whole,
        "bf16": whole.bfloat16(),
        "transposed": whole.view(6, 7).t().unsqueeze(0),
        "slice": torch.arange(100.0)[10:52].view(1, 7, 6),
    }
    wrong = []
    for name, tensor in kinds.items():
        for corner, lengths in BOXES:
            target = torch.full((lengths[1] + 2, lengths[2] + 2), -1.0)
            read(directory / name, tensor, corner, lengths, target[1:-1, 1:-1].unsqueeze(0))
            expected = torch.full_like(target, -1.0)
            box = tuple(slice(low, low + length) for low, length in zip(corner, lengths, strict=True))
            expected[1:-1, 1:-1] = tensor[box][0]
            if not torch.equal(target, expected):
                wrong.append(f"{name} {corner} {lengths}")
    return wrong


def read(path: Path, tensor: Tensor, corner: Any, lengths: Any, target: Tensor) -> None:
    """Save the tensor behind something else, and read one box of it."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    from rlmegatron.conversion.stored_tensors import read_planned

    with path.open("wb") as file:
        file.write(b"something else")
        torch.save(tensor, file)
    index = MetadataIndex("key", torch.Size((0, 0, 0)))
    item = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size((0, 0, 0)),
        storage_index=index,
        storage_offsets=torch.Size(corner),
        lengths=torch.Size(lengths),
    )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.resolve_tensor = lambda _: target  # type: ignore[method-assign]
    info = _StorageInfo(path.name, 14, path.stat().st_size - 14)
    read_planned(path.parent, {index: info}, LoadPlan([item]), planner)


@pytest.mark.parametrize("bytes_at_once", [1, 50, 1 << 26])
def test_any_box_of_a_stored_tensor_is_read(tmp_path: Path, bytes_at_once: int) -> None:
    assert run_ranks(boxes_read, 1, tmp_path, bytes_at_once) == [[]]


def there_and_back(directory: Path, bytes_at_once: int) -> None:
    from rlmegatron.conversion import stored_tensors
    from rlmegatron.models import load

    write_variant(directory / "hf", "qwen2-yarn")
    load._BYTES_AT_ONCE = stored_tensors._BYTES_AT_ONCE = bytes_at_once
    said = [
        to_mcore(directory / "hf", directory / "mcore", verify=True),
        to_hf(directory / "mcore", directory / "back"),
    ]
    assert not any("FAILED" in text for text in said), said


def test_a_conversion_does_not_depend_on_how_much_is_read_at_once(tmp_path: Path) -> None:
    for bytes_at_once in (300, 1 << 26):
        run_ranks(there_and_back, 1, tmp_path / str(bytes_at_once), bytes_at_once)
    for made in ("mcore", "back"):
        assert contents(tmp_path / "300" / made) == contents(tmp_path / str(1 << 26) / made)
