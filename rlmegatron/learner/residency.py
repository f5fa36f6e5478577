"""Moving what a learner holds between the device and pinned host memory, in place: every view of a tensor follows.

In: tensors. Out: their storages emptied on the device, or filled again. On a CPU the learner calls none of this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """The storages under some tensors, each once; `keep` False drops the content (gradients) instead of saving it."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = True, without: Iterable[Tensor] = ()) -> None:
        excluded = {tensor.untyped_storage()._cdata for tensor in without}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._storages = [storage for key, storage in storages.items() if key not in excluded]
        self._keep = keep
        self._saved: list[tuple[int, torch.UntypedStorage | None]] | None = None

    @property
    def on_device(self) -> bool:
        """Whether the tensors can be used."""
        return self._saved is None

    def to_host(self) -> None:
        """Free the device memory; again and again does nothing."""
        if self._saved is None:
            self._saved = []
            for storage in self._storages:
                size, copy = storage.nbytes(), None
                if self._keep:
                    copy = torch.UntypedStorage(size, device="cpu")
                    if storage.device.type == "cuda":
                        copy = copy.pin_memory()
                    copy.copy_(storage)
                self._saved.append((size, copy))
                storage.resize_(0)

    def to_device(self) -> None:
        """Take the device memory and fill it again; dropped content comes back as zeros."""
        if self._saved is not None:
            for storage, (size, copy) in zip(self._storages, self._saved, strict=True):
                storage.resize_(size)
                if copy is None:
                    torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage).zero_()
                else:
                    storage.copy_(copy)
            self._saved = None
