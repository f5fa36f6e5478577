"""What both converters ask for and how they start: the same output arguments, no GPU, from any directory.

In: a script's name and texts. Out: its parser. Must never import torch, which `--help` does not need.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def converter_parser(name: str, *, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser with --out and --dtype; `description` is the script's docstring, of which the first line is shown."""
    parser = argparse.ArgumentParser(
        prog=name,
        description=description.split("\n")[0],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="type of the weights written (default: bf16)"
    )
    return parser


def prepare() -> None:
    """Call before rlmegatron is imported, and torch with it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it runs from any directory, installed or not
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # weights go from disk to disk
