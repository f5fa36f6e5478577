"""The converters as a user meets them: two scripts on the command line.

What this does not prove: what they write (see tests/multiprocess/test_conversion*.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import convert_hf_to_mcore
import convert_mcore_to_hf
import pytest
from jobs import Workspace
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
TO_MCORE, TO_HF = str(ROOT / "tools/convert_hf_to_mcore.py"), str(ROOT / "tools/convert_mcore_to_hf.py")


def call(*command: str, cwd: Path, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """A script of ours, alone or under torchrun."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*launcher, *command], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment, check=False
    )


def tensors(directory: Path) -> dict[str, bytes]:
    with safe_open(directory / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no mapping


@pytest.mark.parametrize("tool", [convert_hf_to_mcore, convert_mcore_to_hf], ids=lambda tool: tool.__name__)
def test_help_names_every_option_and_exit_code_without_waiting_for_torch(tool: object) -> None:
    code = f"import sys, {tool.__name__} as tool; print('torch' in sys.modules); tool.main(['--help'])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tools", timeout=20, check=False
    )
    assert found.returncode == 0
    assert found.stdout.startswith("False\n")
    for part in ("--out DIR", "--dtype {bf16,fp32}", "examples:", "torchrun --nproc-per-node", "exit codes: 0 done, 1"):
        assert part in found.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--mcore", "a"],
        ["--mcore", "a", "--out", "b", "--file-gb", "0"],
        ["--mcore", "a", "--out", "b", "--file-gb", "nan"],
        ["--mcore", "a", "--out", "b", "--file-gb", "inf"],
    ],
    ids=" ".join,
)
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        convert_mcore_to_hf.main(arguments)
    assert end.value.code == 2
    assert "usage: convert_mcore_to_hf.py" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_goes_there_and_back_and_its_tokenizer_with_it(workspace: Workspace, tmp_path: Path) -> None:
    model = workspace.path / "model"
    there = call(TO_MCORE, "--hf", str(model), "--out", "mcore", "--dtype", "fp32", "--verify", cwd=tmp_path)
    assert (there.returncode, there.stdout) == (0, ""), there.stderr
    assert re.search(r"conversion: +100%.*\[\d\d:\d\d<00:00, .*B/s\]", there.stderr)
    assert re.search(r"verification: +100%", there.stderr)
    assert "Warning" not in there.stderr
    again = call(TO_HF, "--mcore", "mcore", "--out", "deep/er/back", "--dtype", "fp32", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, ""), again.stderr
    back = tmp_path / "deep/er/back"
    assert tensors(back) == tensors(model)
    assert {path.name for path in model.iterdir()} == {path.name for path in back.iterdir()}
    assert (back / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    assert sorted(os.listdir(tmp_path)) == ["deep", "mcore"]


@pytest.mark.slow
def test_several_processes_report_a_mistake_once_and_all_fail(workspace: Workspace, tmp_path: Path) -> None:
    model = shutil.copytree(workspace.path / "model", tmp_path / "model")
    os.truncate(model / "model.safetensors", 100_000)
    found = call(TO_MCORE, "--hf", "model", "--out", "mcore", cwd=tmp_path, ranks=2)
    assert found.returncode != 0
    report = "convert_hf_to_mcore: model/model.safetensors: cannot be read as safetensors: it is truncated"
    assert found.stderr.count(report) == 1
    assert re.search(r"exitcode +: 2 ", found.stderr)  # torchrun may end the other one before it ends itself
    assert os.listdir(tmp_path) == ["model"]
