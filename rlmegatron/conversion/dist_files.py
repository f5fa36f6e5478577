"""A distributed checkpoint written and read group by group, through torch's own distributed checkpointing.

In: groups of the canonical model. Out: files that Megatron reads at any layout. Each group has files of its own, and
`.metadata`, without which nothing takes a directory for a checkpoint, comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from rlmegatron.conversion.canonical import Group, checkpoint_state
from rlmegatron.conversion.stored_tensors import read_planned
from rlmegatron.models.dist_checkpoint import check_shapes, left_out, read_metadata
from rlmegatron.models.model_files import COMMON_FILE, DATA_SUFFIX, METADATA_FILE


class DistWriter:
    """Writes groups in any order, from any number of processes; what each has written is told as plain JSON values."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1)

    def write(self, group: Group, tensors: Mapping[str, Tensor], *, number: int) -> list[Any]:
        """Write the `number`-th group; the answer goes to `finish`. OSErrors name the file."""
        planner, plan = _plan(checkpoint_state(group.shards(tensors)) | group.packed_objects())
        plan = replace(plan, storage_data=_StoragePrefix(f"__{number}_"))
        with self._explaining(f"__{number}_0{DATA_SUFFIX}"):
            results = self._writer.write_data(plan, planner).wait()
        return [_to_json(result) for result in results]

    def finish(self, groups: Sequence[Group], written: Sequence[list[Any]]) -> None:
        """Write what makes the files a checkpoint; `written` are the answers of `write` for every group."""
        plans = [_plan(checkpoint_state(group.shards()) | group.packed_objects())[1] for group in groups]
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        _, metadata = planner.create_global_plan(plans)
        with self._explaining(METADATA_FILE):
            torch.save({}, self.directory / COMMON_FILE)
            save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))
            self._writer.finish(metadata, [[_from_json(item) for item in results] for results in written])

    @contextmanager
    def _explaining(self, file: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides it behind its own
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, f"cannot write it: {cause.strerror}", str(self.directory / file)) from None


class DistReader:
    """Fills groups from a whole checkpoint, whatever layout wrote it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metadata = read_metadata(directory)

    def check(self, groups: Sequence[Group]) -> list[str]:
        """What is left out, a line each; ValueError names what is missing, of another shape or not of this model."""
        wanted = [shard for group in groups for shard in group.shards()]
        rows = [entry.rule.parts[0].shape[0] for group in groups for entry in group.entries if entry.rule.padded]
        check_shapes(self.directory, self.metadata, wanted, vocab_size=max(rows))
        return left_out(self.directory, self.metadata, {shard.key for shard in wanted})

    def fill(self, group: Group, tensors: Mapping[str, Tensor]) -> None:
        """Read a group into `tensors`; rows of vocabulary padding that the checkpoint lacks stay as they are."""
        state = checkpoint_state(self._as_stored(shard) for shard in group.shards(tensors))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        read_planned(self.directory, self.metadata.storage_data, planner.create_local_plan(), planner)

    def _as_stored(self, shard: ShardedTensor) -> ShardedTensor:
        """A vocabulary may be padded otherwise in the checkpoint: what both have is read."""
        stored = self.metadata.state_dict_metadata[shard.key]
        assert isinstance(stored, TensorStorageMetadata), f"{shard.key} has been checked"
        return replace(shard, global_shape=tuple(stored.size))


def _plan(state: dict[str, Any]) -> tuple[MCoreSavePlanner, SavePlan]:
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    return planner, planner.create_local_plan()


def _to_json(result: WriteResult) -> list[Any]:
    index, info = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, info.relative_path, info.offset, info.length]


def _from_json(item: list[Any]) -> WriteResult:
    name, offset, index, size, path, start, length = item
    where = MetadataIndex(name, None if offset is None else torch.Size(offset), index)
    return WriteResult(index=where, size_in_bytes=size, storage_data=_StorageInfo(path, start, length))
