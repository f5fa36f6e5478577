"""How a worker of an engine fills its parameters: from memory that it maps, and from buckets as they come.

In: tables of segments once, then an order for each pull. Out: live parameters with new values. Runs in the engine's
process; must import neither sglang nor megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlmegatron.weight_sync.channel import Line, call
from rlmegatron.weight_sync.segments import SegmentTable, copy_segments
from rlmegatron.weight_sync.shared_memory import Handle, open_handle


class Connection:
    """What a worker knows of the training ranks' memory.

    order: "names" of the parameters as the tables count them, "padded" numbers of those with elements that nothing
    writes, "num_buckets", "timeout_s". tensors: "direct" [N 8] and "buckets" [N 8] segments, "bounds" [K + 1] which of
    the latter belong to each bucket.
    """

    def __init__(self, order: Mapping[str, Any], tensors: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        self._names: Sequence[str] = order["names"]
        self._timeout_s: float = order["timeout_s"]
        bounds = tensors["bounds"].tolist()
        self._direct = _Table(tensors["direct"].clone())  # what came with the call goes with it
        self._buckets = [_Table(tensors["buckets"][first:last].clone()) for first, last in pairwise(bounds)]
        self._mapped: dict[Handle, Tensor] = {}
        for number in order["padded"]:
            live[self._names[number]].detach().zero_()

    def pull(self, order: Mapping[str, Any], live: Mapping[str, Tensor]) -> None:
        """order: "sources" are the handles of the direct table, "slots" those of the two buckets as fp32 and bf16,
        "line" [address, token] of the training rank where there are buckets. Raises OSError for memory or a training
        rank that is gone."""
        line = call(order["line"][0], bytes.fromhex(order["line"][1])) if self._buckets else None
        try:
            targets = [live[name].detach() for name in self._names]
            self._direct.copy(self._map(order["sources"]), targets)
            if line is not None:
                self._scatter(line, [self._map(slot) for slot in order["slots"]], targets)
            _synchronize(targets)
        except BaseException:
            if line is not None:
                line.give_up()
            raise
        finally:
            if line is not None:
                line.close()
            if targets and targets[0].is_cuda:
                self._mapped.clear()  # the owner may free or move it before the next pull

    def _scatter(self, line: Line, slots: Sequence[Sequence[Tensor]], targets: Sequence[Tensor]) -> None:
        for number, table in enumerate(self._buckets):
            line.expect(number, timeout_s=self._timeout_s)
            table.copy(slots[number % len(slots)], targets)
            _synchronize(targets)
            line.send(number)

    def _map(self, handles: Sequence[Sequence[Any]]) -> list[Tensor]:
        found = []
        for values in handles:
            handle = Handle(*values)
            if handle not in self._mapped:
                self._mapped[handle] = open_handle(handle)
            found.append(self._mapped[handle])
        return found


class _Table:
    """Segments that are checked against the tensors of the first copy; later ones must be of the same sizes."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._checked: SegmentTable | None = None

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if self._checked is None:
            self._checked = SegmentTable.of(self._rows, sources, targets)
        copy_segments(self._checked, sources, targets)


def _synchronize(targets: Sequence[Tensor]) -> None:
    if targets and targets[0].is_cuda:
        torch.cuda.current_stream(targets[0].device).synchronize()
