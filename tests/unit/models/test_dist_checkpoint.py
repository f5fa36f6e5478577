"""A directory is a Megatron checkpoint only when it is whole, says nothing but data, and is of the model asked for."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlmegatron.models.dist_checkpoint import check_shapes, left_out, read_metadata
from rlmegatron.models.model_files import holds_megatron_checkpoint

EMBEDDING = "embedding.word_embeddings.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"


class Shard:
    """What Megatron says of one tensor that it wants."""

    def __init__(self, key: str, shape: tuple[int, ...], *, padded: bool = False) -> None:
        self.key, self.global_shape, self.allow_shape_mismatch = key, shape, padded


WANTED = [Shard(EMBEDDING, (40, 8), padded=True), Shard(QKV, (2, 16, 8)), Shard(QKV, (2, 16, 8))]


def tensor(*sizes: int, chunks: int = 1) -> TensorStorageMetadata:
    """Cut into equal chunks along the first dimension."""
    rows = sizes[0] // chunks
    boxes = [((number * rows, *[0] * (len(sizes) - 1)), (rows, *sizes[1:])) for number in range(chunks)]
    return TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16),
        torch.Size(sizes),
        [ChunkStorageMetadata(torch.Size(corner), torch.Size(shape)) for corner, shape in boxes],
    )


def metadata() -> Metadata:
    """As torch and Megatron write it, with an object and the paths and ids that newer versions add."""
    tensors = {EMBEDDING: tensor(40, 8), QKV: tensor(2, 16, 8, chunks=2)}
    storage = {
        MetadataIndex(EMBEDDING, torch.Size((0, 0))): _StorageInfo("__0_0.distcp", 0, 700),
        MetadataIndex(QKV, torch.Size((0, 0, 0))): _StorageInfo("__1_0.distcp", 0, 300),
        MetadataIndex(QKV, torch.Size((1, 0, 0))): _StorageInfo("__1_0.distcp", 300, 300),
        MetadataIndex("extra/shard_0_1"): _StorageInfo("__1_0.distcp", 600, 10),
    }
    found = Metadata({**tensors, "extra/shard_0_1": BytesStorageMetadata()}, storage_data=storage)
    found.storage_meta = StorageMeta(checkpoint_id=Path("/somewhere"), save_id="1")
    found.mcore_data = {EMBEDDING: {}}  # type: ignore[attr-defined]
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata()))
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "__0_0.distcp").write_bytes(bytes(700))
    (tmp_path / "__1_0.distcp").write_bytes(bytes(610))
    return tmp_path


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_is_read_as_it_was_written(checkpoint: Path, protocol: int) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata(), protocol=protocol))
    found = read_metadata(checkpoint)
    assert found == metadata()
    assert found.state_dict_metadata[QKV].properties.dtype == torch.bfloat16


class Runs:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (Runs(os.mkdir, "it_has_run"), "posix.mkdir"),
        (Runs(eval, "open('it_has_run', 'w')"), "builtins.eval"),
        (Runs(exec, "open('it_has_run', 'w')"), "builtins.exec"),
        (Runs(torch.load, "it_has_run"), "torch.serialization.load"),
        (Runs(FileSystem), "torch.distributed.checkpoint.filesystem.FileSystem"),
        (Runs(getattr, torch.Size, "__new__"), "'__new__'"),
        (Runs(getattr, torch.device, "__class__"), "'__class__'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metadata_runs_no_code(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: Runs, named: str) -> None:
    monkeypatch.chdir(checkpoint)
    spoiled = metadata()
    spoiled.planner_data = call
    (checkpoint / ".metadata").write_bytes(pickle.dumps(spoiled))
    with pytest.raises(ValueError, match=r"\.metadata: cannot be read as checkpoint metadata: it ") as error:
        read_metadata(checkpoint)
    assert named in str(error.value)
    assert not (checkpoint / "it_has_run").exists()


def test_dotted_names_do_not_lead_out_of_what_is_allowed(checkpoint: Path) -> None:
    """Protocol 4 may ask for an attribute of an attribute: here a function of a module that an allowed one imports."""
    module, name = b"torch.distributed.checkpoint.metadata", b"os.mkdir"
    asked = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name + b"\x93."
    (checkpoint / ".metadata").write_bytes(asked)
    with pytest.raises(ValueError, match="os.mkdir, which no checkpoint needs"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_a_checkpoint_without_the_files_that_come_last_is_unfinished(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    assert holds_megatron_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=f"{checkpoint}/{name} does not exist: .* or an unfinished one"):
        read_metadata(checkpoint)


def test_other_directories_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "metadata.json").touch()
    assert not holds_megatron_checkpoint(tmp_path)
    assert not holds_megatron_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs", pickle.dumps({"a": 1}), pickle.dumps(Metadata({}))]
)
def test_what_is_no_metadata_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=f"{checkpoint}/.metadata: "):
        read_metadata(checkpoint)


def test_missing_and_cut_files_are_named(checkpoint: Path) -> None:
    os.truncate(checkpoint / "__1_0.distcp", 609)
    expected = "__1_0.distcp is truncated: it has 609 bytes, .metadata describes 610"
    with pytest.raises(ValueError, match=expected):
        read_metadata(checkpoint)
    (checkpoint / "__1_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__1_0.distcp is missing, though .metadata names it"):
        read_metadata(checkpoint)


def test_files_elsewhere_are_refused(checkpoint: Path) -> None:
    spoiled = metadata()
    spoiled.storage_data[MetadataIndex(EMBEDDING, torch.Size((0, 0)))].relative_path = "../__0_0.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(spoiled))
    with pytest.raises(ValueError, match="names the file '../__0_0.distcp', which is not in the checkpoint"):
        read_metadata(checkpoint)


def faults(found: Metadata, *, vocab_size: int = 37) -> str:
    with pytest.raises(ValueError, match="^here: ") as error:
        check_shapes("here", found, WANTED, vocab_size=vocab_size)
    return str(error.value)


def test_the_vocabulary_may_be_padded_otherwise_but_not_be_shorter_than_its_tokens() -> None:
    found = metadata()
    for rows in (37, 40, 48):
        found.state_dict_metadata[EMBEDDING] = tensor(rows, 8)
        check_shapes("here", found, WANTED, vocab_size=37)
    found.state_dict_metadata[EMBEDDING] = tensor(36, 8)
    assert faults(found) == f"here: {EMBEDDING} has shape [36, 8], config.json says [40, 8]"
    found.state_dict_metadata[EMBEDDING] = tensor(40, 9)
    assert faults(found) == f"here: {EMBEDDING} has shape [40, 9], config.json says [40, 8]"


def test_a_tensor_that_is_missing_misshapen_or_not_whole_is_named_once() -> None:
    found = metadata()
    found.state_dict_metadata[QKV] = tensor(4, 16, 8)
    assert faults(found) == f"here: {QKV} has shape [4, 16, 8], config.json says [2, 16, 8]"
    found.state_dict_metadata[QKV] = tensor(2, 16, 8, chunks=2)
    del found.state_dict_metadata[QKV].chunks[0]
    assert faults(found) == f"here: holds {QKV} in part"
    found.state_dict_metadata[QKV] = BytesStorageMetadata()
    del found.state_dict_metadata[EMBEDDING]
    assert faults(found) == f"here: has no tensor {EMBEDDING}; has no tensor {QKV}"


def test_an_optimizer_s_state_is_left_out_and_another_model_s_tensor_is_not() -> None:
    found = metadata()
    wanted = {EMBEDDING, QKV}
    assert left_out("here", found, wanted) == []
    for key in (f"optimizer.state.exp_avg.{QKV}", f"chained_0.optimizer.state.exp_avg.{QKV}", "value_head.weight"):
        found.state_dict_metadata[key] = tensor(2, 2)
    assert left_out("here", found, wanted) == ["left out 2 tensors of the optimizer", "left out 1 tensor of value_head"]
    found.state_dict_metadata["decoder.layers.9.mlp.router.weight"] = tensor(2, 2)
    with pytest.raises(ValueError, match="holds what the model of config.json has not: decoder.layers.9.mlp.router"):
        left_out("here", found, wanted)
