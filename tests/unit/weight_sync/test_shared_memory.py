"""Training memory as another process sees it: the same bytes, moved in place, and gone with its owner."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_checkpoint import architecture
from test_hf_stream import stream_of

from rlmegatron.weight_sync.shared_memory import Handle, export, open_handle
from rlmegatron.weight_sync.shared_parameters import SharedParameters


def shared_files() -> set[str]:
    """Those of this process."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"torch_{os.getpid()}_")}


def in_a_child(function: Any, *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def read(values: list[Any]) -> list[float]:
    found = open_handle(Handle(*values))
    return [float(value) for value in found]


def test_every_view_of_a_storage_moves_with_it_and_another_process_reads_it() -> None:
    buffer = torch.arange(8.0)
    parameter, view = torch.nn.Parameter(buffer[2:5]), buffer[3:]
    before = shared_files()
    handle = export(buffer)
    with torch.no_grad():
        parameter.mul_(10)
    assert view.tolist() == [30, 40, 5, 6, 7]
    assert in_a_child(read, handle.as_json()) == [0, 1, 20, 30, 40, 5, 6, 7]
    assert shared_files() == before  # it has no name


def test_a_storage_is_moved_once() -> None:
    buffer = torch.zeros(4)
    first, address = export(buffer), buffer.data_ptr()
    assert export(buffer) == first and buffer.data_ptr() == address


def test_a_mapping_follows_what_is_written_later() -> None:
    buffer = torch.zeros(4)
    mapped = open_handle(export(buffer))
    buffer.fill_(3)
    assert mapped.tolist() == [3, 3, 3, 3]


def leave(queue: Any) -> None:
    queue.put(export(torch.ones(3)).as_json())


def test_memory_of_a_process_that_has_ended_is_an_error() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=leave, args=(queue,))
    process.start()
    handle = Handle(*queue.get())
    process.join()
    with pytest.raises(OSError, match=f"memory of process {handle.pid} cannot be mapped .*is it alive"):
        open_handle(handle)


def test_another_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    handle = export(torch.ones(3))
    with (tmp_path / "other").open("wb") as other, pytest.raises(OSError, match="has vanished"):
        open_handle(replace(handle, descriptor=other.fileno()))


def test_a_book_finds_every_parameter_and_notices_one_that_moved() -> None:
    stream = stream_of(architecture("Qwen2ForCausalLM", tie_word_embeddings=True))
    shared = SharedParameters(stream.rules, stream.parameters)
    mapped = [open_handle(handle) for handle in shared.handles()]
    for number, storage, offset in zip(shared.book.rules, shared.book.storage, shared.book.offset, strict=True):
        tensor = stream.parameters[stream.rules[number].parameter]
        assert torch.equal(mapped[storage][offset : offset + tensor.numel()], tensor.flatten())
    assert len(shared.book.rules) == sum(not rule.copy for rule in stream.rules)
    assert not shared.have_moved()
    name = next(iter(stream.parameters))
    stream.parameters[name] = stream.parameters[name].clone()  # type: ignore[index]
    assert shared.have_moved()


def test_too_little_shared_memory_is_named_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(architecture("Qwen2ForCausalLM"))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    before = shared_files()
    with pytest.raises(ValueError, match=r"/dev/shm has 0.0 MiB free, and the weights .* --shm-size"):
        SharedParameters(stream.rules, stream.parameters)
    assert shared_files() == before
