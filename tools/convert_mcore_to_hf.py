"""Convert a Megatron distributed checkpoint to a Hugging Face directory.

In: --mcore, a checkpoint of any parallel layout, and --hf-config, a directory with the model's config.json and
tokenizer. Out: --out, safetensors with everything beside them. Needs no GPU, and the memory of the largest layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from argument_types import above_zero
from converter.arguments import converter_parser, prepare

_EPILOG = """\
examples:
  python tools/convert_mcore_to_hf.py --mcore Qwen3-8B-mcore --hf-config Qwen3-8B --out Qwen3-8B-back
  python tools/convert_mcore_to_hf.py --mcore runs/my_run/checkpoints/step_000100/actor --hf-config Qwen3-8B --out out
  torchrun --nproc-per-node 8 tools/convert_mcore_to_hf.py --mcore DeepSeek-V3-mcore --hf-config DeepSeek-V3 --out out

Takes what convert_hf_to_mcore.py writes, the checkpoints of a run, and any other checkpoint of the same model in
Megatron's `torch_dist` format; the state of an optimizer in it is left alone. The layers are shared by the processes
that torchrun starts. The output has its name only once it is whole: until then it is OUT.partial, and the same command
goes on where a stopped one stood.

exit codes: 0 done, 1 failed, 2 a mistake in the arguments or the checkpoint, or a full disk; 130 stopped
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    given = _parser().parse_args(argv)
    prepare()
    from rlmegatron.conversion.command import run
    from rlmegatron.conversion.mcore_to_hf import convert

    return run(
        "convert_mcore_to_hf",
        lambda world, topology, say: convert(
            world,
            topology,
            mcore=given.mcore,
            hf_config=given.hf_config or given.mcore,
            out=given.out,
            dtype=given.dtype,
            bytes_per_file=int(given.file_gb * 10**9),
            say=say,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = converter_parser("convert_mcore_to_hf.py", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--mcore", type=Path, required=True, metavar="DIR", help="distributed checkpoint to read")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="directory with the model's config.json, tokenizer and so on (default: those in --mcore)",
    )
    parser.add_argument(
        "--file-gb", type=above_zero, default=5.0, metavar="GB", help="size of a safetensors file (default: 5)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
