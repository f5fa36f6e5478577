"""Bytes of a file straight into a tensor that is there.

In: an open file and an offset. Out: a filled tensor, or an error that names the file. Must never map the file into
memory, nor hold more than the tensor.
"""

from __future__ import annotations

import os
from io import FileIO

import torch
from torch import Tensor


def read_into(tensor: Tensor, file: FileIO, offset: int) -> None:
    """Fill a contiguous tensor with the bytes from `offset` on, as they are."""
    buffer, done = tensor.view(-1).view(torch.uint8).numpy().data, 0
    while done < len(buffer):
        try:
            count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.name)) from None
        if count == 0:
            raise ValueError(f"{file.name}: became shorter while it was read")
        done += count
