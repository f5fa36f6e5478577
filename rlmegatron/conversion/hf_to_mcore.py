"""A Hugging Face directory as a Megatron distributed checkpoint: one layer in memory at a time.

In: a directory of safetensors. Out: a directory that `model.path` takes, that Megatron loads at any layout, and that
carries tokenizer and config.json along. Any number of processes share the layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlmegatron.conversion.canonical import Entry, Group, canonical_groups
from rlmegatron.conversion.dist_files import DistReader, DistWriter
from rlmegatron.conversion.journal import Journal
from rlmegatron.conversion.share import Progress, Share
from rlmegatron.distributed.world import World
from rlmegatron.learner.build import DTYPES
from rlmegatron.learner.groups import Topology
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.decoder_rules import EMBEDDING, HEAD
from rlmegatron.models.export import write_companions
from rlmegatron.models.load import fill, slices
from rlmegatron.models.source import SafetensorsDirectory
from rlmegatron.models.table import read_architecture


def convert(world: World, topology: Topology, *, hf: Path, out: Path, dtype: str, verify: bool, say: Progress) -> None:
    """Collective. A stopped conversion goes on where it stood; RankFailure on every rank where any rank fails."""
    world.lead(lambda: say.lines(_check(hf)))
    arch = read_architecture(str(hf))
    source = SafetensorsDirectory(hf, fp8_block=arch.fp8_block)
    groups, journal = canonical_groups(arch, topology, dtype=dtype), Journal(out)
    world.lead(lambda: _open(journal, source, groups, dtype))
    writer = DistWriter(journal.partial)

    def write(number: int, group: Group) -> None:
        tensors = group.empty_tensors()
        for entry in group.entries:
            fill(tensors[entry.rule.parameter], entry.rule, source, size=1, rank=0)
            say.advance(entry.num_bytes)
        source.release()
        journal.note(number, writer.write(group, tensors, number=number))

    share = Share(world, groups, done=journal.has)
    world.settle("the conversion", lambda: share.each(write, say.bar("converting")))
    world.lead(lambda: writer.finish(groups, [journal.result(number) for number in range(len(groups))]))
    if verify:
        reader = DistReader(journal.partial)
        everything = Share(world, groups, done=lambda _: False)
        compare = Comparison(source, reader, say)
        world.settle("the verification", lambda: everything.each(compare.group, say.bar("verifying")))
    world.lead(lambda: _finish(journal, hf, arch, dtype))


def _check(hf: Path) -> list[str]:
    """Everything that can be wrong with the source; what is left out of it, a line each."""
    arch = read_architecture(str(hf))
    source = SafetensorsDirectory(hf, fp8_block=arch.fp8_block)
    parts = [part for rule in arch.parameter_rules(1) for part in rule.parts]
    return source.expect(parts, arch.dropped, copies={HEAD: EMBEDDING} if arch.tied_embeddings else None)


def _open(journal: Journal, source: SafetensorsDirectory, groups: list[Group], dtype: str) -> None:
    journal.open({"from": str(source.directory.resolve()), "files": source.fingerprint(), "dtype": dtype})
    needed = sum(group.num_bytes for number, group in enumerate(groups) if not journal.has(number))
    free = shutil.disk_usage(journal.partial).free
    if needed > free:
        raise OSError(f"{journal.partial}: the checkpoint needs {needed:,} bytes, the disk has {free:,} left")


def _finish(journal: Journal, hf: Path, arch: Architecture, dtype: str) -> None:
    write_companions(hf, journal.partial, arch, DTYPES[dtype])
    journal.finish()


class Comparison:
    """Whether a checkpoint holds, bit for bit, what the source says in the checkpoint's type."""

    def __init__(self, source: SafetensorsDirectory, reader: DistReader, say: Progress) -> None:
        self._source, self._reader, self._say = source, reader, say

    def group(self, _: int, group: Group) -> None:
        """ValueError names the first tensor that differs."""
        tensors = group.empty_tensors()
        self._reader.fill(group, tensors)
        for entry in group.entries:
            self._entry(entry, tensors)
            self._say.advance(entry.num_bytes)
        self._source.release()

    def _entry(self, entry: Entry, tensors: Mapping[str, Tensor]) -> None:
        found, shapes = tensors[entry.rule.parameter], {part.name: part.shape for part in entry.rule.parts}
        for piece in entry.rule.pieces(size=1, rank=0):
            expected = self._source.read(piece.name, piece.source, shapes[piece.name]).to(found.dtype)
            if not torch.equal(_bits(found[slices(piece.target)]), _bits(expected)):
                raise ValueError(f"{self._reader.directory}: {entry.rule.parameter} differs from {piece.name}")


def _bits(tensor: Tensor) -> Tensor:
    """Equal where the bits are, NaN or not."""
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)
