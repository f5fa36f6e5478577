"""The program of every rank: `torchrun --nproc-per-node N launch/train.py --config FILE [section.key=value ...]`.

In: arguments (see --help). Out: the exit code. Must never hold logic; it runs from any directory, installed or not.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmegatron.cli import train_main

# Checkpoint writers are spawned and import this file again: without the guard they would start a run of their own.
if __name__ == "__main__":
    sys.exit(train_main(sys.argv[1:]))
