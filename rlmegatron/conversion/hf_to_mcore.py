"""A Hugging Face directory as a Megatron distributed checkpoint: one layer in memory at a time.

In: a directory of safetensors. Out: a directory that `model.path` takes, that Megatron loads at any layout, and that
carries tokenizer and config.json along. Any number of processes share the layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlmegatron.conversion.canonical import Group, canonical_groups
from rlmegatron.conversion.dist_files import DistReader, DistWriter
from rlmegatron.conversion.journal import Journal
from rlmegatron.conversion.share import Progress, Share
from rlmegatron.distributed.world import World
from rlmegatron.learner.build import DTYPES
from rlmegatron.learner.groups import Topology
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.directory_check import has_tokenizer
from rlmegatron.models.export import write_companions
from rlmegatron.models.load import fill, hold_to, slices, strips
from rlmegatron.models.model_files import CONFIG_FILE, holds_megatron_checkpoint
from rlmegatron.models.rules import Rule
from rlmegatron.models.source import SafetensorsDirectory
from rlmegatron.models.table import read_architecture


def convert(world: World, topology: Topology, *, hf: Path, out: Path, dtype: str, verify: bool, say: Progress) -> None:
    """Collective. A stopped conversion goes on where it stood, and one that is finished can still be verified.

    RankFailure on every rank where any rank fails.
    """
    world.lead(lambda: say.lines(_check(hf)))
    arch, source, groups = world.settle("the start", lambda: _plan(hf, topology, dtype))
    journal = Journal(out)
    if verify and world.lead(lambda: holds_megatron_checkpoint(out)):
        world.lead(lambda: say.lines([f"{out} is there already: verifying it"]))
        _verify(world, journal, groups, Comparison(source, DistReader(out), journal, say), say)
        return
    world.lead(lambda: _open(journal, source, groups, dtype))
    writer = DistWriter(journal.partial)

    def write(number: int, group: Group) -> None:
        tensors = group.empty_tensors()
        for entry in group.entries:
            fill(tensors[entry.rule.parameter], entry.rule, source, size=1, rank=0)
            say.advance(entry.num_bytes)
        source.release()
        journal.note(number, writer.write(group, tensors, number=number))

    Share(world, journal, groups).each("conversion", write, say)
    world.lead(lambda: _complete(journal, writer, groups))
    if verify:
        _verify(world, journal, groups, Comparison(source, DistReader(journal.partial), journal, say), say)
    world.lead(lambda: _finish(journal, hf, arch, dtype))
    world.lead(lambda: say.lines([f"wrote {out}: {sum(group.num_bytes for group in groups):,} bytes in {dtype}"]))


def _verify(world: World, journal: Journal, groups: Sequence[Group], compare: Comparison, say: Progress) -> None:
    Share(world, journal, groups, again=True).each("verification", compare.group, say)
    count = sum(len(entry.rule.parts) for group in groups for entry in group.entries)
    world.lead(lambda: say.lines([f"verified: {count:,} tensors are those of the source, bit for bit"]))


def _check(hf: Path) -> list[str]:
    """Everything that can be wrong with the source; what is left out of it, a line each."""
    arch = read_architecture(str(hf))
    if holds_megatron_checkpoint(hf):
        raise ValueError(f"{hf} is a Megatron checkpoint; --hf takes a Hugging Face directory with safetensors")
    lines = hold_to(arch, hf)
    return lines if has_tokenizer(hf) else [*lines, f"{hf} has no tokenizer, which training will ask for"]


def _plan(hf: Path, topology: Topology, dtype: str) -> tuple[Architecture, SafetensorsDirectory, list[Group]]:
    arch = read_architecture(str(hf))
    return arch, SafetensorsDirectory(hf, fp8_block=arch.fp8_block), canonical_groups(arch, topology, dtype=dtype)


def _open(journal: Journal, source: SafetensorsDirectory, groups: Sequence[Group], dtype: str) -> None:
    config = (source.directory / CONFIG_FILE).stat()
    files = {**source.fingerprint(), CONFIG_FILE: [config.st_size, config.st_mtime_ns]}
    journal.open({"--hf": str(source.directory.resolve()), "--dtype": dtype, **files})
    needed = sum(group.num_bytes for number, group in enumerate(groups) if not journal.has(number))
    free = shutil.disk_usage(journal.partial).free
    if needed > free:
        raise OSError(f"{journal.partial}: the checkpoint needs {needed:,} bytes, the disk has {free:,} left")


def _complete(journal: Journal, writer: DistWriter, groups: Sequence[Group]) -> None:
    """Make the files a checkpoint, and read what that says of itself."""
    writer.finish(groups, [journal.result(number) for number in range(len(groups))])
    DistReader(journal.partial).check(groups)


def _finish(journal: Journal, hf: Path, arch: Architecture, dtype: str) -> None:
    write_companions(hf, journal.partial, arch, DTYPES[dtype])
    journal.finish()


class Comparison:
    """Whether a checkpoint holds, bit for bit, what the source says in the checkpoint's type."""

    def __init__(self, source: SafetensorsDirectory, reader: DistReader, journal: Journal, say: Progress) -> None:
        self._source, self._reader, self._journal, self._say = source, reader, journal, say

    def group(self, number: int, group: Group) -> None:
        """ValueError names the first tensor that differs; its group is no longer taken for finished."""
        tensors = group.empty_tensors()
        self._reader.fill(group, tensors)
        for entry in group.entries:
            differs = self._difference(entry.rule, tensors[entry.rule.parameter])
            if differs is not None:
                self._journal.forget(number)
                is_finished = self._reader.directory != self._journal.partial
                then = "delete it and convert again" if is_finished else f"the same command writes {group.name} anew"
                raise ValueError(f"{self._reader.directory}: {entry.rule.parameter} is not {differs}; {then}")
            self._say.advance(entry.num_bytes)
        self._source.release()

    def _difference(self, rule: Rule, found: Tensor) -> str | None:
        """What should be there bit for bit and is not, if anything."""
        shapes = {part.name: part.shape for part in rule.parts}
        for strip in strips(rule, size=1, rank=0):
            expected = self._source.read(strip.name, strip.source, shapes[strip.name]).to(found.dtype)
            if not torch.equal(_bits(found[slices(strip.target)]), _bits(expected)):
                return strip.name
        return "0 in its padding" if rule.padded and found[rule.parts[0].shape[0] :].any() else None


def _bits(tensor: Tensor) -> Tensor:
    """Equal where the bits are, NaN or not."""
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)
