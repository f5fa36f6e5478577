"""A converter's memory is that of the largest group, not of the model: measured on processes of their own.

What this does not prove: the same at hundreds of GB, or with the page cache of other systems.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

ROOT = Path(__file__).parents[2]
# 1.5 GB: twice a vocabulary of 0.33 GB, and four layers of 0.22 GB in experts of 4 and 8 MB, which a heap keeps.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 80000,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_RUN = """
import sys
sys.path[:0] = [{tools!r}, {root!r}]
import {tool}
code = {tool}.main(sys.argv[1:])
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
sys.exit(code)
"""


def write_checkpoint(directory: Path) -> tuple[int, int]:
    """Files of 300 MB with random bytes that are numbers; bytes of the largest group, and of all."""
    import torch
    from sharded import Layout, start

    from rlmegatron.conversion.canonical import canonical_groups
    from rlmegatron.models.safetensors_writer import SafetensorsWriter
    from rlmegatron.models.stream import checkpoint_tensors
    from rlmegatron.models.table import read_architecture

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    arch = read_architecture(str(directory))
    specs = checkpoint_tensors(arch.parameter_rules(1), torch.bfloat16)
    writer = SafetensorsWriter(directory, specs, bytes_per_file=300_000_000)
    writer.create()
    noise = torch.randn(1 << 20).bfloat16()
    for number, spec in enumerate(specs):
        values = spec.num_bytes // 2
        writer.write(spec.name, noise.roll(number).repeat(-(-values // len(noise)))[:values].view(spec.shape))
    writer.close()
    groups = canonical_groups(arch, start(Layout(1, {})), dtype="bf16")
    return max(group.num_bytes for group in groups), sum(group.num_bytes for group in groups)


def peak(tool: str, *arguments: str, code: int = 0) -> int:
    """Most bytes of memory that a tool has held, which ends with `code`."""
    program = _RUN.format(tools=str(ROOT / "tools"), root=str(ROOT), tool=tool)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=560,
        env=environment,
        check=False,
    )
    assert done.returncode == code, done.stderr
    found = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert found is not None
    return int(found[1]) << 10


def digests(directory: Path) -> dict[str, str]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_group_both_ways(tmp_path: Path) -> None:
    """A second copy of a vocabulary, or a third of the layers, would show: the program itself needs half a GB."""
    hf, mcore, back = tmp_path / "hf", tmp_path / "mcore", tmp_path / "back"
    ((largest, total),) = run_ranks(write_checkpoint, 1, hf)
    assert total > 4.5 * largest > 1.4 * 10**9
    expected = digests(hf)
    program = peak("convert_hf_to_mcore", "--hf", str(tmp_path / "absent"), "--out", str(mcore), code=2)
    there = peak("convert_hf_to_mcore", "--hf", str(hf), "--out", str(mcore))
    shutil.rmtree(hf)
    back_again = peak("convert_mcore_to_hf", "--mcore", str(mcore), "--out", str(back), "--file-gb", "0.3")
    shutil.rmtree(mcore)
    assert max(there, back_again) < 1.5 * largest + 10**9, (there, back_again, largest)
    assert max(there, back_again) < 1.5 * largest + program, (there, back_again, largest, program)
    assert digests(back) == expected
    shutil.rmtree(back)
