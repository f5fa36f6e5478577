"""Filling parameters: each rank reads its own rows of what the rule names; faults of files are in `test_source.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlmegatron.models.load import load_parameters
from rlmegatron.models.rules import Part, Rule
from rlmegatron.models.source import SafetensorsDirectory

RULE = Rule("output", (Part("head", (5, 2)),), dim=0, padded=8)
HEAD = torch.arange(10.0).view(5, 2)


def load(
    source: SafetensorsDirectory,
    rule: Rule = RULE,
    *,
    tp: tuple[int, int] = (1, 0),
    etp: tuple[int, int] = (1, 0),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The parameter of one rank; `tp` and `etp` are (size, rank)."""
    size = (tp if rule.axis == "tp" else etp)[0]
    parameter = torch.nn.Parameter(torch.full(rule.local_shape(size), torch.nan, dtype=dtype))
    cuts = {"tp": tp, "etp": etp}
    load_parameters(source, {"here": parameter}, {"here": rule}, cut=lambda axis: cuts[axis])
    return parameter.detach()


def saved(
    directory: Path, tensors: dict[str, Tensor], *, fp8_block: tuple[int, int] | None = None
) -> SafetensorsDirectory:
    save_file(tensors, directory / "model.safetensors")
    return SafetensorsDirectory(directory, fp8_block=fp8_block)


def test_each_rank_reads_its_rows_and_padding_is_zero(tmp_path: Path) -> None:
    source = saved(tmp_path, {"head": HEAD})
    assert torch.equal(load(source), torch.cat([HEAD, torch.zeros(3, 2)]))
    assert torch.equal(load(source, tp=(2, 1)), torch.cat([HEAD[4:], torch.zeros(3, 2)]))


def test_a_rank_of_padding_alone_is_zero(tmp_path: Path) -> None:
    rule = Rule("output", (Part("head", (5, 2)),), dim=0, padded=16)
    assert torch.equal(load(saved(tmp_path, {"head": HEAD}), rule, tp=(2, 1)), torch.zeros(8, 2))


def test_fused_parameter_comes_from_several_files(tmp_path: Path) -> None:
    gate, up = torch.randn(4, 2), torch.randn(4, 2)
    save_file({"gate": gate}, tmp_path / "a.safetensors")
    save_file({"up": up}, tmp_path / "b.safetensors")
    index = {"weight_map": {"gate": "a.safetensors", "up": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    rule, source = Rule("fc1", (Part("gate", (4, 2)), Part("up", (4, 2))), dim=0), SafetensorsDirectory(tmp_path)
    assert torch.equal(load(source, rule), torch.cat([gate, up]))
    assert torch.equal(load(source, rule, tp=(2, 1)), torch.cat([gate[2:], up[2:]]))


def test_experts_are_cut_along_their_own_axis(tmp_path: Path) -> None:
    down = torch.randn(2, 6)
    rule, source = Rule("fc2", (Part("down", (2, 6)),), dim=1, expert=0), saved(tmp_path, {"down": down})
    assert torch.equal(load(source, rule, tp=(2, 1), etp=(3, 2)), down[:, 4:])
    assert torch.equal(load(source, rule, tp=(2, 1)), down)


def test_weights_take_the_type_of_the_parameter(tmp_path: Path) -> None:
    source = saved(tmp_path, {"head": torch.full((5, 2), 1.0 / 3)})
    assert torch.equal(load(source, dtype=torch.bfloat16)[:5], torch.full((5, 2), 1.0 / 3).bfloat16())


def test_quantised_weights_are_multiplied_in_fp32_and_then_rounded(tmp_path: Path) -> None:
    weight = torch.arange(1, 17.0).view(4, 4).t().contiguous().to(torch.float8_e4m3fn)  # these are exact
    scales = torch.tensor([[1 / 3, 2 / 3], [0.7, 1 / 7]])
    source = saved(tmp_path, {"head": weight, "head_scale_inv": scales}, fp8_block=(2, 2))
    exact = weight.float() * scales.repeat_interleave(2, 0).repeat_interleave(2, 1)
    rule = Rule("output", (Part("head", (4, 4)),), dim=1)
    assert torch.equal(load(source, rule, tp=(4, 1)), exact[:, 1:2])
    assert torch.equal(load(source, rule, tp=(4, 1), dtype=torch.bfloat16), exact[:, 1:2].bfloat16())
    rounded_first = weight.bfloat16() * scales.bfloat16().repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert not torch.equal(exact[:, 1:2].bfloat16(), rounded_first[:, 1:2])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint has no tensor head"):
        load(saved(tmp_path, {"tail": HEAD}))


def test_another_shape_than_the_config_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"head has shape \[6, 2\], config.json says \[5, 2\]"):
        load(saved(tmp_path, {"head": torch.zeros(6, 2)}))


def test_a_parameter_of_another_shape_than_its_rule_is_our_mistake(tmp_path: Path) -> None:
    parameters = {"here": torch.zeros(5, 2)}
    with pytest.raises(AssertionError, match=r"here: Megatron built \(5, 2\), the rule says \(8, 2\)"):
        load_parameters(saved(tmp_path, {"head": HEAD}), parameters, {"here": RULE}, cut=lambda _: (1, 0))
