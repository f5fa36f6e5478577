"""A sharded model exported from any layout is the checkpoint it was loaded from, bit for bit.

What this does not prove: speed or memory of a large model's export.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from sharded import Layout, sharded_model, start, streamed

from rlmegatron.learner.build import HiddenStatesModel
from rlmegatron.models.export import export
from rlmegatron.models.table import read_architecture

TP2 = Layout(2, {"tensor": 2})
VPP2 = Layout(2, {"pipeline": 2, "virtual_pipeline": 2})
MORE = [Layout(2, {"pipeline": 2}), Layout(4, {"tensor": 2, "pipeline": 2})]


def write(source: str, layout: Layout, out: str, bytes_per_bucket: int, bytes_per_file: int) -> int:
    """Exports; the number of buckets on this rank."""
    topology = start(layout)
    stream = sharded_model(HiddenStatesModel, source, topology).tensor_stream()
    writes = topology.tp_rank == topology.pp_rank == 0
    arch = read_architecture(source)
    limits = {"bytes_per_bucket": bytes_per_bucket, "bytes_per_file": bytes_per_file}
    export(stream, arch, source=source, out=Path(out), dtype=torch.float32, writes=writes, **limits)
    return len(list(stream.buckets(bytes_per_bucket=bytes_per_bucket, dtype=torch.float32, receive=False)))


def assert_export_is_the_source(source: Path, layout: Layout, out: Path) -> None:
    num_buckets = run_ranks(write, layout.num_ranks, str(source), layout, str(out), 30_000, 100_000)
    assert len(set(num_buckets)) == 1 and num_buckets[0] > 5
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    found = {name: load_file(out / file)[name] for name, file in weight_map.items()}
    expected = load_file(source / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not out.with_name(out.name + ".partial").exists()


@pytest.mark.parametrize(("family", "layout"), [("Qwen3", TP2), ("Qwen2", VPP2)], ids=str)
def test_export_is_the_source(models: Path, tmp_path: Path, family: str, layout: Layout) -> None:
    """Qwen3 ties its embeddings and its vocabulary is padded at TP 2; Qwen2 has biases and a head of its own."""
    assert_export_is_the_source(models / family, layout, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama"])
@pytest.mark.parametrize("layout", [TP2, VPP2, *MORE], ids=str)
def test_export_of_every_family_is_the_source(models: Path, tmp_path: Path, family: str, layout: Layout) -> None:
    assert_export_is_the_source(models / family, layout, tmp_path / "out")


def difference(source: str, out: str) -> float:
    """Largest difference of log-probs between two directories, as transformers loads them."""
    from tiny_models import batch_of, hf_scores
    from transformers import AutoModelForCausalLM

    batch = batch_of(range(8))
    with torch.no_grad():
        before, after = (
            hf_scores(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch)[0]
            for path in (source, out)
        )
    assert float(before.abs().max()) > 1
    return float((before - after).abs().max())


def test_transformers_loads_the_export(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_ranks(write, 2, str(models / "Qwen3"), TP2, str(out), 1 << 30, 1 << 30)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert run_ranks(difference, 1, str(models / "Qwen3"), str(out)) == [0.0]


def stream_every_way(source: str, layout: Layout) -> bool:
    """Whether the stream is the same for every size of bucket and empty where nobody asked."""
    topology = start(layout)
    model = sharded_model(HiddenStatesModel, source, topology)
    whole, cut = streamed(model, bytes_per_bucket=1 << 30), streamed(model, bytes_per_bucket=1)
    unasked = list(model.tensor_stream().buckets(bytes_per_bucket=1000, dtype=torch.float32, receive=False))
    same = all(torch.equal(whole[name], tensor) for name, tensor in cut.items())
    return whole.keys() == cut.keys() and same and not any(unasked)


def test_stream_does_not_depend_on_bucket_size(models: Path) -> None:
    assert run_ranks(stream_every_way, 2, str(models / "Qwen2"), TP2) == [True, True]


def fail_to_write(source: str, layout: Layout, out: str) -> str:
    """What this rank raised, when the disk is full for the one that writes."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwrite = full  # this process ends with the function
    topology = start(layout)
    stream = sharded_model(HiddenStatesModel, source, topology).tensor_stream()
    limits = {"bytes_per_bucket": 1000, "bytes_per_file": 1 << 30}
    try:
        arch, writes = read_architecture(source), topology.tp_rank == 0
        export(stream, arch, source=source, out=Path(out), dtype=torch.float32, writes=writes, **limits)
    except OSError as error:
        return str(error)
    return ""


def test_a_full_disk_on_the_writer_leaves_no_rank_waiting(models: Path, tmp_path: Path) -> None:
    found = run_ranks(fail_to_write, 2, str(models / "Qwen3"), TP2, str(tmp_path / "out"), timeout_s=60)
    file = tmp_path / "out.partial" / "model.safetensors"
    assert found[0].startswith(f"[Errno 28] cannot write {file}: No space left on device") and found[1] == ""
    assert not (tmp_path / "out").exists()
