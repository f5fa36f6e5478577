"""A Megatron distributed checkpoint as a Hugging Face directory: one layer in memory at a time.

In: a checkpoint of any layout, and a Hugging Face directory whose config.json, tokenizer and other files belong to the
model. Out: safetensors with an index, and those files. Any number of processes share the layers.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rlmegatron.conversion.canonical import Entry, Group, canonical_groups
from rlmegatron.conversion.dist_files import DistReader
from rlmegatron.conversion.journal import Journal
from rlmegatron.conversion.share import Progress, Share
from rlmegatron.distributed.world import World
from rlmegatron.learner.build import DTYPES
from rlmegatron.learner.groups import Topology
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.dist_checkpoint import METADATA_FILE
from rlmegatron.models.export import write_companions
from rlmegatron.models.load import slices
from rlmegatron.models.safetensors_writer import SafetensorsWriter
from rlmegatron.models.stream import checkpoint_tensors
from rlmegatron.models.table import read_architecture


def convert(
    world: World,
    topology: Topology,
    *,
    mcore: Path,
    hf_config: Path,
    out: Path,
    dtype: str,
    bytes_per_file: int,
    say: Progress,
) -> None:
    """Collective. A stopped conversion goes on where it stood; RankFailure on every rank where any rank fails."""
    world.lead(lambda: _check(mcore, hf_config))
    arch = read_architecture(str(hf_config))
    groups, reader, journal = canonical_groups(arch, topology, dtype=dtype), DistReader(mcore), Journal(out)
    writer = SafetensorsWriter(
        journal.partial, checkpoint_tensors(arch.parameter_rules(1), DTYPES[dtype]), bytes_per_file=bytes_per_file
    )
    world.lead(lambda: _open(journal, reader, groups, writer, dtype))
    if not world.is_lead:
        writer.open()

    def write(number: int, group: Group) -> None:
        tensors = group.empty_tensors()
        reader.fill(group, tensors)
        for entry in group.entries:
            _write_parts(entry, tensors[entry.rule.parameter], writer)
            say.advance(entry.num_bytes)
        journal.note(number, None)

    share = Share(world, groups, done=journal.has)
    world.settle("the conversion", lambda: share.each(write, say.bar("converting")))
    writer.close()
    world.lead(lambda: _finish(journal, hf_config, arch, dtype))


def _check(mcore: Path, hf_config: Path) -> None:
    if not (mcore / METADATA_FILE).is_file():
        raise ValueError(f"{mcore} has no {METADATA_FILE}: it is no Megatron checkpoint, or an unfinished one")
    read_architecture(str(hf_config))


def _open(journal: Journal, reader: DistReader, groups: list[Group], writer: SafetensorsWriter, dtype: str) -> None:
    reader.check(groups)
    stat = (reader.directory / METADATA_FILE).stat()
    journal.open({"from": str(reader.directory.resolve()), "files": [stat.st_size, stat.st_mtime_ns], "dtype": dtype})
    if journal.is_new:
        writer.create()
    else:
        writer.open()


def _write_parts(entry: Entry, tensor: torch.Tensor, writer: SafetensorsWriter) -> None:
    """The Hugging Face tensors of one parameter; a second home of a tensor writes nothing."""
    if entry.rule.copy:
        return
    for part in entry.rule.parts:
        whole = torch.empty(part.shape, dtype=tensor.dtype)
        for piece in entry.rule.pieces(size=1, rank=0):
            if piece.name == part.name:
                whole[slices(piece.source)] = tensor[slices(piece.target)]
        writer.write(part.name, whole)


def _finish(journal: Journal, hf_config: Path, arch: Architecture, dtype: str) -> None:
    write_companions(hf_config, journal.partial, arch, DTYPES[dtype])
    journal.finish()
