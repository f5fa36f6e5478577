"""Convert a Hugging Face directory to a Megatron distributed checkpoint that loads at any parallel layout.

In: --hf, a directory of safetensors. Out: --out, a directory that `model.path` takes. Needs no GPU, and the memory of
the largest layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from converter.arguments import converter_parser, prepare

_EPILOG = """\
examples:
  python tools/convert_hf_to_mcore.py --hf Qwen3-8B --out Qwen3-8B-mcore
  python tools/convert_hf_to_mcore.py --hf DeepSeek-V3 --out DeepSeek-V3-mcore --verify
  torchrun --nproc-per-node 8 tools/convert_hf_to_mcore.py --hf DeepSeek-V3 --out DeepSeek-V3-mcore

The layers are shared by the processes that torchrun starts; each holds one layer at a time. The output has its name
only once it is whole: until then it is OUT.partial, and the same command goes on where a stopped one stood. FP8
weights in blocks (DeepSeek-V3) are dequantised; layers that a policy has no use for are left out, with a line that says
so. The output carries tokenizer and config.json along: give it to model.path as it is.

exit codes: 0 done, 1 failed, 2 a mistake in the arguments or the source, or a full disk; 130 stopped
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    given = _parser().parse_args(argv)
    prepare()
    from rlmegatron.conversion.command import run
    from rlmegatron.conversion.hf_to_mcore import convert

    return run(
        "convert_hf_to_mcore",
        lambda world, topology, say: convert(
            world, topology, hf=given.hf, out=given.out, dtype=given.dtype, verify=given.verify, say=say
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = converter_parser("convert_hf_to_mcore.py", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="Hugging Face directory to read")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the result, also one that is there already, and compare every tensor with its source",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
