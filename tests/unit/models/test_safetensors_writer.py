"""Writing safetensors tensor by tensor: the bytes of the safetensors library, and errors that name the file."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlmegatron.models.safetensors_header import NUM_BYTES
from rlmegatron.models.safetensors_writer import SafetensorsWriter, TensorSpec
from rlmegatron.models.source import SafetensorsDirectory
from rlmegatron.models.stored_dtypes import DTYPES

TENSORS = {
    "layers.10.weight": torch.randn(3, 5).bfloat16(),
    "layers.2.weight": torch.randn(7).bfloat16(),
    "router.bias": torch.randn(3),
    "half": torch.randn(2, 2, 3).half(),
    "number": torch.tensor(1.5).bfloat16(),
    "empty": torch.empty(0, 4),
    "größe": torch.randn(1),
}


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def test_a_header_counts_the_bytes_that_torch_has_for_every_type() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == NUM_BYTES


def plan(*sizes: int, dtype: torch.dtype = torch.float32) -> list[TensorSpec]:
    """Vectors a, b, c ... of these sizes."""
    return [TensorSpec(name, (size,), dtype) for name, size in zip("abcdefgh", sizes, strict=False)]


def files_of(directory: Path) -> dict[str, list[str]]:
    return {file.name: list(load_file(file)) for file in sorted(directory.glob("*.safetensors"))}


def no_space(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_one_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    """Odd numbers of 2-byte values beside 4-byte ones, written in another order than they were announced in."""
    (tmp_path / "ours").mkdir()
    writer = SafetensorsWriter(tmp_path / "ours", specs_of(TENSORS))
    writer.create()
    for name in random.Random(0).sample(sorted(TENSORS), len(TENSORS)):
        writer.write(name, TENSORS[name])
    writer.close()
    save_file(TENSORS, tmp_path / "library.safetensors", {"format": "pt"})
    assert [file.name for file in (tmp_path / "ours").iterdir()] == ["model.safetensors"]
    ours = tmp_path / "ours" / "model.safetensors"
    assert ours.read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    with safe_open(ours, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in TENSORS.items())


def test_several_processes_write_into_one_checkpoint(tmp_path: Path) -> None:
    """Here several objects; each writes every third tensor, and together they leave nothing out."""
    specs = specs_of(TENSORS)
    first = SafetensorsWriter(tmp_path, specs, bytes_per_file=30)
    first.create()
    others = [SafetensorsWriter(tmp_path, specs, bytes_per_file=30) for _ in range(2)]
    for other in others:
        other.open()
    for number, (name, tensor) in enumerate(TENSORS.items()):
        [first, *others][number % 3].write(name, tensor)
    assert first.missing() == ["layers.2.weight", "router.bias", "number", "empty"]
    for writer in (first, *others):
        writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert (
        files_of(tmp_path).keys() == set(index["weight_map"].values()) and index["weight_map"].keys() == TENSORS.keys()
    )
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])
    SafetensorsDirectory(tmp_path).check()


def test_tensors_are_cut_into_files_in_order(tmp_path: Path) -> None:
    """Sizes 8, 8, 20, 4 bytes with at most 16 a file: the third is too large for any and gets its own."""
    SafetensorsWriter(tmp_path, plan(2, 2, 5, 1), bytes_per_file=16).create()
    assert files_of(tmp_path) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }


def test_values_take_the_announced_type(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, plan(2, 2, dtype=torch.bfloat16))
    writer.create()
    thirds = torch.tensor([1.0, 2.0]) / 3
    writer.write("a", thirds)
    writer.write("b", torch.stack([thirds, thirds], dim=1)[:, 0].requires_grad_())
    writer.close()
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["a"], thirds.bfloat16()) and torch.equal(found["b"], thirds.bfloat16())


def test_a_tensor_written_again_replaces_itself(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, plan(2, 2))
    writer.create()
    for value in (1.0, 2.0):
        writer.write("a", torch.full((2,), value))
    assert writer.missing() == ["b"]
    writer.close()
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [2.0, 2.0]


def test_files_are_readable_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        SafetensorsWriter(tmp_path, plan(1, 1), bytes_per_file=1).create()
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_space_is_taken_before_anything_is_written(tmp_path: Path) -> None:
    SafetensorsWriter(tmp_path, plan(1 << 20)).create()
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 >= 4 << 20


def test_only_what_was_announced_is_written(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, plan(2))
    writer.create()
    with pytest.raises(AssertionError, match="x was not announced"):
        writer.write("x", torch.zeros(2))
    with pytest.raises(AssertionError, match=r"a is \[2, 1\], announced as \[2\]"):
        writer.write("a", torch.zeros(2, 1))
    with pytest.raises(AssertionError, match="names of their own"):
        SafetensorsWriter(tmp_path, [*plan(2), *plan(2)])


def test_writing_does_not_go_on_in_files_of_another_plan(tmp_path: Path) -> None:
    """Other types, sizes, files or cuts, a truncated file, a missing one, an index too much or too few."""
    specs = plan(2, 2)
    with pytest.raises(ValueError, match="model.safetensors: is not as it was planned"):
        SafetensorsWriter(tmp_path, specs).open()
    SafetensorsWriter(tmp_path, specs).create()
    SafetensorsWriter(tmp_path, specs).open()
    other = [TensorSpec("a", (2,), torch.float32), TensorSpec("x", (2,), torch.float32)]
    for wrong in (plan(2, 2, dtype=torch.float16), plan(2, 3), other):
        with pytest.raises(ValueError, match="model.safetensors: is not as it was planned"):
            SafetensorsWriter(tmp_path, wrong).open()
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors: is not as it was planned"):
        SafetensorsWriter(tmp_path, specs, bytes_per_file=8).open()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="model.safetensors.index.json: is not as it was planned"):
        SafetensorsWriter(tmp_path, specs).open()
    os.truncate(tmp_path / "model.safetensors", 20)
    with pytest.raises(ValueError, match="model.safetensors: is not as it was planned"):
        SafetensorsWriter(tmp_path, specs).open()


def test_files_that_are_there_are_not_created_over(tmp_path: Path) -> None:
    SafetensorsWriter(tmp_path, plan(2)).create()
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match=f"cannot write {tmp_path}/model.safetensors: File exists"):
        SafetensorsWriter(tmp_path, plan(2)).create()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_disk_too_small_shows_at_once_and_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three files has no room: 8 bytes of values each, and a header."""
    real, calls = os.posix_fallocate, []

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 2:
            no_space()
        real(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    writer = SafetensorsWriter(tmp_path, plan(2, 2, 2), bytes_per_file=8)
    with pytest.raises(OSError) as caught:
        writer.create()
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value).endswith(
        f"cannot write {tmp_path}/model-00002-of-00003.safetensors: No space left on device; "
        f"it needs {calls[1]} bytes of {3 * calls[1]} for all files"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("call", "act"), [("pwrite", "write"), ("fsync", "close")])
def test_a_disk_that_fails_is_said_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, act: str
) -> None:
    writer = SafetensorsWriter(tmp_path, plan(2))
    writer.create()
    size = (tmp_path / "model.safetensors").stat().st_size
    with pytest.raises(OSError, match=f"cannot write {tmp_path}/model.safetensors: No space left.*needs {size} bytes$"):
        if act == "write":
            monkeypatch.setattr(os, call, no_space)
        writer.write("a", torch.zeros(2))
        monkeypatch.setattr(os, call, no_space)
        writer.close()
    assert (writer.missing() == ["a"]) is (act == "write")


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take fewer bytes than it is given, and takes at most 2 GiB."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, data[:3], offset))
    writer = SafetensorsWriter(tmp_path, plan(5))
    writer.create()
    writer.write("a", torch.arange(5.0))
    writer.close()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.arange(5.0))
