"""Weights from Hugging Face safetensors into a running sharded model: each rank reads only the slices it owns.

In: a directory, the local model chunks and this rank's place. Out: filled parameters, each checked to be covered. Must
never communicate: every rank reads for itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rlmegatron.models.rules import Box, Rule


class SafetensorsDirectory:
    """The tensors of one or several safetensors files, opened as they are needed."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        index = self.directory / "model.safetensors.index.json"
        self._files: dict[str, str]
        if index.is_file():
            self._files = _read_index(index)
        elif (self.directory / "model.safetensors").is_file():
            with self._open("model.safetensors") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ValueError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
        self._handles: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self) -> None:
        """Open every file; ValueError names one that is not whole."""
        for file in sorted(set(self._files.values())):
            self._open(file)

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._files)

    def read(self, name: str, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        """One box of tensor `name`, whose whole shape must be `shape`."""
        if name not in self._files:
            raise ValueError(f"{self.directory}: the checkpoint has no tensor {name}")
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = self._open(file)
        found = self._handles[file].get_slice(name)
        if tuple(found.get_shape()) != shape:
            found_shape = found.get_shape()
            raise ValueError(f"{self.directory / file}: {name} has shape {found_shape}, config.json says {list(shape)}")
        return found[tuple(slice(start, stop) for start, stop in box)]  # type: ignore[no-any-return]

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.directory / file, framework="pt")
        except Exception as error:  # safetensors raises its own and OSErrors alike
            raise ValueError(f"{self.directory / file}: cannot be read as safetensors: {error}") from None


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as an index of safetensors: {error!r}") from None


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


@torch.no_grad()
def load_parameters(
    source: SafetensorsDirectory,
    parameters: Mapping[str, torch.nn.Parameter],
    rules: Mapping[str, Rule],
    *,
    tp: int,
    rank: int,
) -> None:
    """Fill `parameters` (one chunk's, by local name) from `source`; rows of vocabulary padding become 0."""
    for name, parameter in parameters.items():
        rule = rules[name]
        if tuple(parameter.shape) != rule.local_shape(tp):
            built, ruled = tuple(parameter.shape), rule.local_shape(tp)
            raise AssertionError(f"{name}: Megatron built {built}, the rule says {ruled}")
        if rule.padded:
            parameter.zero_()
        shapes = {part.name: part.shape for part in rule.parts}
        for piece in rule.pieces(tp=tp, rank=rank):
            parameter[slices(piece.target)] = source.read(piece.name, piece.source, shapes[piece.name]).to(parameter)
