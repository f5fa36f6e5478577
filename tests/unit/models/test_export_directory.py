"""A model as a Hugging Face directory, from a stand-in for its stream; `tests/multiprocess` has sharded models."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rlmegatron.models.export as export_module
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.export import copy_companions, export, exported_config
from rlmegatron.models.safetensors_writer import SafetensorsWriter, TensorSpec
from rlmegatron.models.source import SafetensorsDirectory
from rlmegatron.models.table import architecture_of

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 0,
    "n_routed_experts": 2,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "dtype": "float64",
    "rms_norm_eps": 1e-06,
}
KEPT = {
    "tokenizer.json": "tokens",
    "generation_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "modeling_mine.py": "code",
    "README.md": "card",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}
OLD = (
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "consolidated.00.pth",
    "optimizer.pt",
    "model.gguf",
    "flax_model.msgpack",
    "tf_model.h5",
    "__0_0.distcp",
    ".metadata",
    "common.pt",
    "metadata.json",
    "original/consolidated.00.pth",
    "original/tokenizer.model",
    "checkpoint-10/tokenizer.json",
    ".git/HEAD",
)


@dataclass
class FakeStream:
    """Yields its tensors in reverse, a bucket of two at a time; `ended` once a reader has come to the end."""

    content: dict[str, Tensor]
    lost: str = ""
    ended: bool = False
    most_alive: int = 0
    alive: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet)

    def tensors(self, dtype: torch.dtype) -> list[TensorSpec]:
        return [
            TensorSpec(name, tuple(tensor.shape), torch.float32 if name == "router.bias" else dtype)
            for name, tensor in self.content.items()
        ]

    def buckets(
        self, *, bytes_per_bucket: int, dtype: torch.dtype, receive: bool
    ) -> Iterator[list[tuple[str, Tensor]]]:
        names = [name for name in reversed(self.content) if name != self.lost]
        for first in range(0, len(names), 2):
            bucket = [(name, self.content[name].clone()) for name in names[first : first + 2] if receive]
            self.alive.update(tensor for _, tensor in bucket)
            self.most_alive = max(self.most_alive, len(self.alive))
            yield bucket
            del bucket
        self.ended = True


@pytest.fixture
def arch() -> Architecture:
    return architecture_of(CONFIG)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What lies beside the weights of a model, and old weights in every format, which must not travel."""
    directory = tmp_path / "source"
    for file in (*KEPT, *OLD):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(KEPT.get(file, "old"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream({**{f"layers.{n}": torch.randn(n + 1, 3) for n in range(9)}, "router.bias": torch.randn(3)})


def write(stream: FakeStream, arch: Architecture, source: Path, out: Path, **changes: Any) -> None:
    settings: dict[str, Any] = {"dtype": torch.float32, "writes": True, **changes}
    export(stream, arch, source=str(source), out=out, **settings)  # type: ignore[arg-type]


def files_below(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()}


def found_in(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("bytes_per_file", [100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_directory_holds_the_exact_weights_in_any_order_of_arrival(
    stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path, dtype: torch.dtype, bytes_per_file: int
) -> None:
    """A tensor that its family keeps in fp32 stays in fp32."""
    out = tmp_path / "new" / "out"
    write(stream, arch, source, out, dtype=dtype, bytes_per_file=bytes_per_file)
    SafetensorsDirectory(out).check()
    found = found_in(out)
    expected = {name: tensor if name == "router.bias" else tensor.to(dtype) for name, tensor in stream.content.items()}
    assert found.keys() == expected.keys()
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )
    assert (out / "model.safetensors.index.json").exists() is (len(list(out.glob("*.safetensors"))) > 1)
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_what_lies_beside_the_weights_travels(
    stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path
) -> None:
    write(stream, arch, source, tmp_path / "out", dtype=torch.bfloat16)
    assert files_below(tmp_path / "out") == {*KEPT, "config.json", "model.safetensors"}
    assert all((tmp_path / "out" / file).read_text() == text for file, text in KEPT.items())
    changed = {"dtype": "bfloat16", "num_nextn_predict_layers": 0}
    expected = {key: value for key, value in {**CONFIG, **changed}.items() if key != "quantization_config"}
    text = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(text) == expected and list(json.loads(text)) == list(expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        (
            {"torch_dtype": None, "x": None, "y": {"dtype": "float32"}},
            {"torch_dtype": "bfloat16", "x": None, "y": {"dtype": "float32"}},
        ),
    ],
)
def test_config_says_the_type_in_its_own_spelling(
    arch: Architecture, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert exported_config(before, arch, torch.bfloat16) == {**after, "num_nextn_predict_layers": 0}


def test_a_link_to_nowhere_beside_the_weights_is_not_passed_over(source: Path, tmp_path: Path) -> None:
    """As a download that was cut short leaves it in the cache; one in place of old weights is no matter."""
    (tmp_path / "out").mkdir()
    (source / "old.safetensors").symlink_to(tmp_path / "gone")
    copy_companions(source, tmp_path / "out")
    (source / "merges.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"merges.txt"):
        copy_companions(source, tmp_path / "out")


def test_no_more_than_one_bucket_is_alive(stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path) -> None:
    write(stream, arch, source, tmp_path / "out")
    assert stream.most_alive == 2


def test_a_rank_that_does_not_write_takes_part_and_touches_nothing(
    stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.partial").mkdir()
    write(stream, arch, source, tmp_path / "out", writes=False)
    assert stream.ended
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out.partial"}


def test_an_older_export_is_replaced(stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path) -> None:
    """Whatever a stopped one has left beside it is gone too."""
    out = tmp_path / "out"
    for remains in (out, tmp_path / "out.partial", tmp_path / "out.old"):
        remains.mkdir()
        (remains / "left.over").write_text("")
    write(stream, arch, source, out)
    assert not (out / "left.over").exists() and (out / "model.safetensors").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out"}


def test_an_export_may_replace_its_own_source(
    stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path
) -> None:
    write(stream, arch, source, source)
    assert files_below(source) == {*KEPT, "config.json", "model.safetensors"}


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fail_late(patch: pytest.MonkeyPatch) -> None:
    """The disk fills up when half of the tensors are written."""
    real, count = SafetensorsWriter.write, []

    def sometimes(self: SafetensorsWriter, name: str, tensor: Tensor) -> None:
        count.append(name)
        if len(count) > 5:
            no_space()
        real(self, name, tensor)

    patch.setattr(SafetensorsWriter, "write", sometimes)


def fail_to_rename(patch: pytest.MonkeyPatch) -> None:
    """The older export has lost its name by then."""
    real = Path.rename
    patch.setattr(Path, "rename", lambda path, to: no_space() if path.suffix == ".partial" else real(path, to))


FAILURES = {
    "reserve": lambda patch: patch.setattr(os, "posix_fallocate", no_space),
    "write": fail_late,
    "sync": lambda patch: patch.setattr(os, "fsync", no_space),
    "copy": lambda patch: patch.setattr(export_module.shutil, "copyfile", no_space),
    "config": lambda patch: patch.setattr(Path, "write_text", no_space),
    "rename": fail_to_rename,
}


@pytest.mark.parametrize("fails", FAILURES)
def test_a_failed_export_never_looks_finished(
    stream: FakeStream,
    arch: Architecture,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
) -> None:
    """Not the first time, and not over an older export, which stays; the stream is followed to its end each time."""
    out = tmp_path / "out"
    for older in (None, b"older weights"):
        stream.ended = False
        if older:
            out.mkdir()
            (out / "model.safetensors").write_bytes(older)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            FAILURES[fails](patch)
            write(stream, arch, source, out)
        assert stream.ended
        assert {file.name for file in tmp_path.iterdir()} == ({"source", "out"} if older else {"source"})
        assert not older or (out / "model.safetensors").read_bytes() == older
    write(stream, arch, source, out)
    assert found_in(out).keys() == stream.content.keys()


def test_a_stream_that_leaves_a_tensor_out_gives_no_directory(
    stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path
) -> None:
    stream.lost = "layers.3"
    with pytest.raises(AssertionError, match=r"the stream ended without \['layers.3'\]"):
        write(stream, arch, source, tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == {"source"}


def test_a_source_without_config_is_named(stream: FakeStream, arch: Architecture, source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=f"{source}/config.json does not exist"):
        write(stream, arch, source, tmp_path / "out")
    assert stream.ended and {file.name for file in tmp_path.iterdir()} == {"source"}
