"""`python -m rlmegatron COMMAND`; see `cli.py`. In: arguments. Out: the exit code. Must never hold logic."""

from __future__ import annotations

import sys

from rlmegatron.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
