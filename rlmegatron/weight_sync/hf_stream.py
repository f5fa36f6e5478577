"""The general transport: whole Hugging Face tensors, bucket by bucket, placed by SGLang's own loader.

In: a `TensorStream` of the policy. Out: loaded engines and, for `verify`, the digest of every box of every engine rank.
It is slow and works for everything; faster transports are tested against it bit for bit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.stream import TensorStream
from rlmegatron.rollout.api import EngineError, RolloutEngine
from rlmegatron.weight_sync.digest import digest
from rlmegatron.weight_sync.engine_layout import Placement, placements
from rlmegatron.weight_sync.engine_worker import REPORT


class HfStream:
    """Streams the whole model to each engine once per publish."""

    name = "hf_stream"

    def __init__(
        self, stream: TensorStream, arch: Architecture, *, engine_tensor: int, dtype: torch.dtype, bytes_per_bucket: int
    ) -> None:
        self._stream, self._dtype, self._bytes_per_bucket = stream, dtype, bytes_per_bucket
        self._boxes = [list(placements(arch, tp=engine_tensor, rank=rank)) for rank in range(engine_tensor)]
        self._expected: list[dict[Placement, int]] = []

    def transfer(self, engine: RolloutEngine | None) -> None:
        """See `Transport`."""
        self._expected = [{} for _ in self._boxes]
        failure: Exception | None = None
        buckets = self._stream.buckets(
            bytes_per_bucket=self._bytes_per_bucket, dtype=self._dtype, receive=engine is not None
        )
        for bucket in buckets:
            if engine is None or failure is not None:
                continue
            try:
                engine.update_weights(bucket)
                self._note(bucket)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _note(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        tensors = dict(bucket)
        for expected, boxes in zip(self._expected, self._boxes, strict=True):
            for box in boxes:
                if box.name in tensors:
                    expected[box] = digest(tensors[box.name][slices(box.source)])

    def verify(self, engine: RolloutEngine) -> None:
        """See `Transport`."""
        entries, digests = [], []
        for boxes in self._boxes:
            listed = json.dumps([[box.parameter, box.target] for box in boxes]).encode()
            entries.append(torch.frombuffer(bytearray(listed), dtype=torch.uint8))
            digests.append(torch.zeros(len(boxes), dtype=torch.int64).share_memory_())
        engine.update_weights([("entries", entries), ("digests", digests)], load_format=REPORT)
        wrong: dict[str, list[int]] = defaultdict(list)
        for rank, (boxes, found) in enumerate(zip(self._boxes, digests, strict=True)):
            for box, value in zip(boxes, found.tolist(), strict=True):
                if self._expected[rank][box] != value:
                    wrong[f"{box.name} (in {box.parameter})"].append(rank)
        if wrong:
            name, ranks = next(iter(wrong.items()))
            raise EngineError(
                f"after the transfer {len(wrong)} of {len(self._boxes[0])} tensors differ between learner and engine; "
                f"the first is {name} on engine ranks {ranks}"
            )
