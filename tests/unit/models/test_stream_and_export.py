"""Whole tensors from a model of one process, in buckets and as a directory; `test_export.py` has sharded models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import rlmegatron.models.export as export_module
from rlmegatron.models.export import export
from rlmegatron.models.stream import shard_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What lies beside the weights of a model, and old weights in every format, which must not travel."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "float64", "extra": [1, 2]}))
    (directory / "tokenizer.json").write_text("tokens")
    (directory / "generation_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    for old in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "optimizer.pt",
    ):
        (directory / old).write_text("old")
    return directory


@pytest.fixture
def exported(make_architecture: Any, make_tensors: Any, make_stream: Any, source: Path) -> Callable[..., Any]:
    """`exported(out, tied=..., dtype=..., ...)` writes a random model and returns its tensors."""

    def run(out: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32, **limits: int) -> Any:
        arch = make_architecture(tie_word_embeddings=tied)
        tensors = make_tensors(arch)
        export(make_stream(arch, tensors), source=str(source), out=out, dtype=dtype, writes=True, **limits)
        return tensors

    return run


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", [1, 700, 5000, 1 << 20])
def test_buckets_hold_every_tensor_once_in_order(
    make_architecture: Any, make_tensors: Any, make_stream: Any, limit: int, tied: bool
) -> None:
    """A bucket exceeds its limit only when it is one parameter; the tied head is not sent a second time."""
    arch = make_architecture(tie_word_embeddings=tied)
    tensors = make_tensors(arch)
    stream = make_stream(arch, tensors)
    buckets = list(stream.buckets(bytes_per_bucket=limit, dtype=torch.float32, receive=True))
    names = [name for bucket in buckets for name, _ in bucket]
    assert names == [name for name, _ in stream.names_and_shapes()]
    assert sorted(names) == sorted(tensors)
    assert ("lm_head.weight" in names) is not tied
    assert all(torch.equal(tensor, tensors[name]) for bucket in buckets for name, tensor in bucket)
    num_rules = sum(not rule.copy for rule in arch.parameter_rules(1))
    assert len(buckets) == {1: num_rules, 1 << 20: 1}.get(limit, len(buckets))
    together = {
        parts: sum(tensors[part.name].nbytes for part in rule.parts)
        for rule in arch.parameter_rules(1)
        for parts in [tuple(part.name for part in rule.parts)]
    }
    for bucket in buckets:
        alone = tuple(name for name, _ in bucket) in together
        # The embedding's parameter is 16 rows long and its tensor 13, so the tensors may be smaller than the buffer.
        assert alone or sum(tensor.nbytes for _, tensor in bucket) <= limit


def test_tensors_are_cut_into_files_in_order() -> None:
    """Sizes 8, 8, 20, 4 bytes with at most 16 a file: the third is too large for any and gets its own."""
    shapes = [("a", (2,)), ("b", (2,)), ("c", (5,)), ("d", (1,))]
    assert shard_files(shapes, itemsize=4, max_bytes=16) == [["a", "b"], ["c"], ["d"]]


def test_one_file_holds_the_exact_weights(exported: Any, tmp_path: Path) -> None:
    tensors = exported(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index(exported: Any, tmp_path: Path) -> None:
    tensors = exported(tmp_path / "out", bytes_per_file=1000, bytes_per_bucket=300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = {file: load_file(tmp_path / "out" / file) for file in files}
    assert {name: file for file, content in found.items() for name in content} == index["weight_map"]
    assert all(torch.equal(found[index["weight_map"][name]][name], tensor) for name, tensor in tensors.items())


def test_what_lies_beside_the_weights_travels(exported: Any, source: Path, tmp_path: Path) -> None:
    exported(tmp_path / "out", dtype=torch.bfloat16)
    kept = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == kept
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokens"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": "bfloat16", "extra": [1, 2]}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())


def test_an_older_export_is_replaced(exported: Any, tmp_path: Path) -> None:
    exported(tmp_path / "out")
    (tmp_path / "out" / "left.over").write_text("")
    exported(tmp_path / "out", tied=True)
    assert not (tmp_path / "out" / "left.over").exists()
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("fails", ["save_file", "_copy_the_rest"])
def test_a_failed_export_never_looks_finished(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Not the first time, and not over an older export, which stays; the next one succeeds over the remains."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(export_module, fails, full)
        exported(out)
    assert not out.exists()
    exported(out)
    before = (out / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(export_module, fails, full)
        exported(out, tied=True)
    assert (out / "model.safetensors").read_bytes() == before
    exported(out, tied=True)
    assert not (tmp_path / "out.partial").exists()
