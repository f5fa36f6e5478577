"""Reading safetensors: every way in which a directory can be wrong is one error that says where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlmegatron.models.load import SafetensorsDirectory, load_parameters
from rlmegatron.models.rules import Part, Rule

RULE = Rule("output", (Part("head", (5, 2)),), dim=0, padded=8)
HEAD = torch.arange(10.0).view(5, 2)


def load(
    directory: Path, rule: Rule = RULE, *, tp: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.full(rule.local_shape(tp), torch.nan, dtype=dtype))
    load_parameters(SafetensorsDirectory(str(directory)), {"here": parameter}, {"here": rule}, tp=tp, rank=rank)
    return parameter.detach()


def test_each_rank_reads_its_rows_and_padding_is_zero(tmp_path: Path) -> None:
    save_file({"head": HEAD}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path), torch.cat([HEAD, torch.zeros(3, 2)]))
    assert torch.equal(load(tmp_path, tp=2, rank=1), torch.cat([HEAD[4:], torch.zeros(3, 2)]))


def test_fused_parameter_comes_from_several_files(tmp_path: Path) -> None:
    gate, up = torch.randn(4, 2), torch.randn(4, 2)
    save_file({"gate": gate}, tmp_path / "a.safetensors")
    save_file({"up": up}, tmp_path / "b.safetensors")
    index = {"weight_map": {"gate": "a.safetensors", "up": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    rule = Rule("fc1", (Part("gate", (4, 2)), Part("up", (4, 2))), dim=0)
    assert torch.equal(load(tmp_path, rule), torch.cat([gate, up]))
    assert torch.equal(load(tmp_path, rule, tp=2, rank=1), torch.cat([gate[2:], up[2:]]))
    assert SafetensorsDirectory(str(tmp_path)).names() == ["gate", "up"]


def test_weights_take_the_type_of_the_parameter(tmp_path: Path) -> None:
    save_file({"head": torch.full((5, 2), 1.0 / 3)}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path, dtype=torch.bfloat16)[:5], torch.full((5, 2), 1.0 / 3).bfloat16())


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model.safetensors and no model.safetensors.index.json"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 6, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"head": HEAD}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors: cannot be read as safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("text", ['{"weight_map": ', "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json: cannot be read as an index"):
        load(tmp_path)


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"head": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"gone.safetensors: cannot be read as safetensors"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"tail": HEAD}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="the checkpoint has no tensor head"):
        load(tmp_path)


def test_another_shape_than_the_config_says_is_refused(tmp_path: Path) -> None:
    save_file({"head": torch.zeros(6, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"head has shape \[6, 2\], config.json says \[5, 2\]"):
        load(tmp_path)
