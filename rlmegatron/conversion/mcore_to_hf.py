"""A Megatron distributed checkpoint as a Hugging Face directory: one layer in memory at a time.

In: a checkpoint of any layout, and a Hugging Face directory whose config.json, tokenizer and other files belong to the
model. Out: safetensors with an index, and those files. Any number of processes share the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlmegatron.conversion.canonical import Group, canonical_groups
from rlmegatron.conversion.dist_files import DistReader
from rlmegatron.conversion.journal import Journal
from rlmegatron.conversion.share import Progress, Share
from rlmegatron.distributed.world import World
from rlmegatron.learner.build import DTYPES
from rlmegatron.learner.groups import Topology
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.dist_checkpoint import read_metadata
from rlmegatron.models.export import write_companions
from rlmegatron.models.load import slices
from rlmegatron.models.model_files import CONFIG_FILE, METADATA_FILE, holds_megatron_checkpoint
from rlmegatron.models.rules import Rule
from rlmegatron.models.safetensors_writer import SafetensorsWriter
from rlmegatron.models.stream import checkpoint_tensors
from rlmegatron.models.table import read_architecture

_FILES = "files"


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
    arch, reader, groups = world.settle("the start", lambda: _plan(mcore, hf_config, topology, dtype))
    world.lead(lambda: say.lines(reader.check(groups)))
    journal, tensors = Journal(out), checkpoint_tensors(arch.parameter_rules(1), DTYPES[dtype])
    writer = SafetensorsWriter(journal.partial, tensors, bytes_per_file=bytes_per_file)
    given = {"--mcore": str(mcore.resolve()), "--dtype": dtype, "--file-gb": bytes_per_file}
    world.lead(lambda: _open(journal, given, [mcore / METADATA_FILE, hf_config / CONFIG_FILE], writer))
    world.settle("the start", writer.open)

    def write(number: int, group: Group) -> None:
        tensors = group.empty_tensors()
        reader.fill(group, tensors)
        for entry in group.entries:
            for name, tensor in _parts(entry.rule, tensors[entry.rule.parameter]):
                writer.write(name, tensor)
            say.advance(entry.num_bytes)
        writer.close()
        journal.note(number, None)

    Share(world, journal, groups).each("conversion", write, say)
    world.lead(lambda: _finish(journal, hf_config, arch, dtype))
    world.lead(lambda: say.lines([f"wrote {out}: {sum(one.num_bytes for one in tensors):,} bytes in {dtype}"]))


def _check(mcore: Path, hf_config: Path) -> None:
    """The commonest mistakes, told before anything is read."""
    if not mcore.is_dir():
        raise ValueError(f"{mcore} does not exist")
    if not holds_megatron_checkpoint(mcore):
        inside = sorted(path.parent.name for path in mcore.glob(f"*/{METADATA_FILE}"))
        hint = f"; did you mean {mcore / inside[0]}?" if inside else ""
        raise ValueError(f"{mcore} is no Megatron checkpoint: it has no {METADATA_FILE}{hint}")
    if not (hf_config / CONFIG_FILE).is_file():
        raise ValueError(f"{hf_config} has no {CONFIG_FILE}; give --hf-config a directory that belongs to the model")
    read_architecture(str(hf_config))
    read_metadata(mcore)


def _plan(mcore: Path, hf_config: Path, topology: Topology, dtype: str) -> tuple[Architecture, DistReader, list[Group]]:
    arch = read_architecture(str(hf_config))
    return arch, DistReader(mcore), canonical_groups(arch, topology, dtype=dtype)


def _open(journal: Journal, given: Mapping[str, Any], files: Sequence[Path], writer: SafetensorsWriter) -> None:
    """Reserve the files, unless a stopped conversion has done so to the end."""
    journal.open({**given, **{path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}})
    if not journal.has(_FILES):
        for left in journal.partial.glob("*.safetensors*"):
            left.unlink()
        writer.create()
        journal.note(_FILES, None)


def _parts(rule: Rule, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of one parameter; a second home of a tensor has none."""
    if rule.copy:
        return
    pieces = list(rule.pieces(size=1, rank=0))
    for part in rule.parts:
        mine = [piece for piece in pieces if piece.name == part.name]
        if len(mine) == 1:  # a view, as the vocabulary should not be there twice
            yield part.name, tensor[slices(mine[0].target)]
            continue
        whole = torch.empty(part.shape, dtype=tensor.dtype)
        for piece in mine:
            whole[slices(piece.source)] = tensor[slices(piece.target)]
        yield part.name, whole


def _finish(journal: Journal, hf_config: Path, arch: Architecture, dtype: str) -> None:
    write_companions(hf_config, journal.partial, arch, DTYPES[dtype])
    journal.finish()
