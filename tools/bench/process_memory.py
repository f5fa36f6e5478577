"""How much memory processes really hold, and the most they held while something ran.

In: process ids. Out: bytes, as proportional set size: a page that n processes map counts 1/n for each, so that shared
memory is counted once over all of them. Linux only. Must never import torch.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Sequence
from pathlib import Path

_PAUSE_S = 0.005


def held_bytes(pids: Sequence[int]) -> int:
    """Of all together, now; what Python and the C library could give back is given back in this process first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return sum(_held(pid) for pid in pids)


def _held(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss")


class PeakMemory:
    """The most that processes held together, looked at every few milliseconds, and twice more: at entry and at exit.

    Looking costs time, so what runs meanwhile is not to be timed. A shorter peak may be missed.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._has_ended.wait(_PAUSE_S):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, sum(_held(pid) for pid in self._pids))
