"""The general transport: whole Hugging Face tensors, bucket by bucket, placed by SGLang's own loader.

In: a `TensorStream` of the policy. Out: loaded engines and, for `verify`, the digest of every box of every engine rank.
It is slow and works for everything; faster transports are tested against it bit for bit.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.rules import Box
from rlmegatron.models.stream import TensorStream
from rlmegatron.platform.sglang_cpu import find_engine_needs
from rlmegatron.rollout.api import EngineError, RolloutEngine
from rlmegatron.weight_sync.digest import digest
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_loader import loadable
from rlmegatron.weight_sync.engine_placement import Placement
from rlmegatron.weight_sync.engine_worker import ORDER, REPORT


class HfStream:
    """Streams the whole model to each engine once per publish."""

    name = "hf_stream"

    def __init__(
        self, stream: TensorStream, arch: Architecture, *, engine_tensor: int, dtype: torch.dtype, bytes_per_bucket: int
    ) -> None:
        self._stream, self._arch = stream, arch
        self._dtype, self._bytes_per_bucket = dtype, bytes_per_bucket
        self._engine_tensor = engine_tensor
        self._expected: dict[tuple[str, Box], int] = {}

    @cached_property
    def _boxes(self) -> list[list[Placement]]:
        """Of every engine rank; for a large model a lot, which only a rank that leads an engine looks at."""
        on_cpu, tensor = not find_engine_needs().cuda, self._engine_tensor
        return [list(placements(self._arch, tp=tensor, rank=rank, on_cpu=on_cpu)) for rank in range(tensor)]

    @cached_property
    def _sources(self) -> dict[str, set[Box]]:
        """The boxes of each tensor that some engine rank holds."""
        found: dict[str, set[Box]] = defaultdict(set)
        for box in (box for boxes in self._boxes for box in boxes):
            found[box.name].add(box.source)
        return found

    def transfer(self, engine: RolloutEngine | None) -> None:
        """See `Transport`."""
        self._expected = {}
        failure: Exception | None = None
        buckets = self._stream.buckets(
            bytes_per_bucket=self._bytes_per_bucket, dtype=self._dtype, receive=engine is not None
        )
        if engine is None:
            for _ in buckets:
                pass
            return
        for bucket in loadable(buckets, self._arch):
            if failure is not None or not bucket:
                continue
            try:
                engine.update_weights(bucket)
                self._note(bucket)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _note(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in bucket:
            for source in self._sources[name]:
                self._expected[name, source] = digest(tensor[slices(source)])

    def verify(self, engine: RolloutEngine) -> None:
        """See `Transport`."""
        with tempfile.TemporaryDirectory(prefix="rlmegatron_digests_") as directory:
            paths = [Path(directory) / f"{rank}.json" for rank in range(len(self._boxes))]
            orders = [order(path, boxes) for path, boxes in zip(paths, self._boxes, strict=True)]
            engine.update_weights([(ORDER, orders)], load_format=REPORT)
            reports = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        wrong: dict[str, list[int]] = defaultdict(list)
        for rank, (boxes, report) in enumerate(zip(self._boxes, reports, strict=True)):
            for box, found in zip(boxes, report, strict=True):
                if self._expected[box.name, box.source] != found:
                    wrong[_difference(box, found)].append(rank)
        if wrong:
            first, ranks = next(iter(wrong.items()))
            raise EngineError(
                f"after the transfer {len(wrong)} of {len(self._boxes[0])} pieces differ between learner and engine; "
                f"the first is {first} on engine ranks {ranks}"
            )


def order(path: Path, boxes: Sequence[Placement]) -> Tensor:
    """What `report_digests` takes from one rank: JSON in bytes."""
    homes = [[[home.parameter, home.box] for home in box.homes] for box in boxes]
    text = json.dumps({"path": str(path), "boxes": homes}).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _difference(box: Placement, found: int | str) -> str:
    what = f"in {box.homes[0].parameter}" if isinstance(found, int) else found
    return f"{box.name} ({what})"
