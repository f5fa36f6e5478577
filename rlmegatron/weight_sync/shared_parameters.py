"""The training parameters of one rank, in memory that the engine's workers can map.

In: parameters by rule. Out: an `AddressBook`, and handles for the memory. Parameters stay where they are for everyone
who holds them: on a CPU their storages move, in place, to shared memory without a name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlmegatron.models.rules import Rule
from rlmegatron.weight_sync.address_book import AddressBook
from rlmegatron.weight_sync.shared_memory import Handle, export

SHARED_MEMORY = "/dev/shm"


class SharedParameters:
    """Shared for as long as this object and the parameters live."""

    def __init__(self, rules: Sequence[Rule], parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._places = self._where()
        self.storages: list[Tensor] = []
        numbers: dict[tuple[int, torch.dtype], int] = {}
        rows = []
        for number, rule in enumerate(rules):
            tensor = parameters.get(rule.parameter)
            if tensor is None or rule.copy:
                continue
            assert tensor.is_contiguous(), f"{rule.parameter} is not contiguous"
            key = (tensor.untyped_storage()._cdata, tensor.dtype)
            if key not in numbers:
                numbers[key] = len(self.storages)
                self.storages.append(_whole(tensor))
            rows.append((number, numbers[key], tensor.storage_offset()))
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        if self.device.type == "cpu":
            _require_room(self.storages)
            self.handles()  # moves them
        self.book = AddressBook(table[:, 0], table[:, 1], table[:, 2])

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.storages[0].device

    def have_moved(self) -> bool:
        """Whether somebody gave a parameter other memory since; then this book is of no use any more."""
        return self._places != self._where()

    def handles(self, numbers: Iterable[int] | None = None) -> list[Handle]:
        """Of some storages, or of all, for one other process. On a CPU they are the same every time, for everybody."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what others read must have been written
        return [export(self.storages[number]) for number in (range(len(self.storages)) if numbers is None else numbers)]

    def _where(self) -> list[tuple[int, int]]:
        """Storage and place in it of every parameter; one that leaves the device and comes back keeps both."""
        return [(tensor.untyped_storage()._cdata, int(tensor.storage_offset())) for tensor in self._parameters.values()]


def _require_room(storages: Sequence[Tensor]) -> None:
    """Torch would leave a file behind where it finds none."""
    needed = sum(tensor.nbytes for tensor in storages if not tensor.is_shared())
    found = os.statvfs(SHARED_MEMORY)
    free = found.f_bavail * found.f_frsize
    if needed > free:
        mib = 1 << 20
        raise ValueError(
            f"{SHARED_MEMORY} has {free / mib:,.1f} MiB free, and the weights that engines read there take "
            f"{needed / mib:,.1f} MiB of this rank alone; make it larger (docker run --shm-size)"
        )


def _whole(tensor: Tensor) -> Tensor:
    """Everything in a tensor's storage, in its type."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
