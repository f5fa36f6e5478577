"""How a benchmark that was started without torchrun becomes torchrun of itself.

In: a script, its arguments and a number of ranks. Out: never back. Must never import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def become_torchrun(script: str, argv: Sequence[str] | None, *, num_ranks: int) -> NoReturn:
    """Run `script` with `argv`, or with this process's arguments, on `num_ranks` ranks in place of this process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, less its warning
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    os.execv(sys.executable, [*torchrun, script, *(sys.argv[1:] if argv is None else argv)])
