"""Types of command-line arguments that several tools have; one that counts something is `rlmegatron.cli.count_of`.

In: a word of the command line. Out: a number, or what argparse reports as the user's mistake. Must never import
rlmegatron, which a converter finds only once it has prepared itself.
"""

from __future__ import annotations

import argparse
from math import inf


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return number


def not_negative(text: str) -> int:
    """A whole number, which may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
