"""Hugging Face to Megatron and back, every family: bit for bit, and loadable at every layout.

What this does not prove: memory and time at real sizes (see test_conversion_memory.py), or Transformer Engine's layers.
"""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import contents, describe, differing, to_hf, to_mcore, weights
from family_models import VARIANTS, has_experts
from ranks import run_ranks
from sharded import Layout, policy, start, streamed
from test_families import EP2, EP4, PP2, TP2, TP2_EP2, TP2_EP2_ETP2, TP2_PP2, VPP2
from torch import nn

from rlmegatron.config.schema import ModelConfig
from rlmegatron.learner.build import HiddenStatesModel, ValueModel
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.model import ShardedModel
from rlmegatron.models.dist_checkpoint import read_metadata
from rlmegatron.models.load import slices
from rlmegatron.models.table import read_architecture

DENSE = [name for name in VARIANTS if not has_experts(name)]
MOE = [name for name in VARIANTS if has_experts(name)]


def convert_all(families: Path, out: Path, variants: list[str], dtype: str) -> list[str]:
    return [to_mcore(families / variant, out / variant, dtype=dtype) for variant in variants]


@pytest.fixture(scope="session")
def converted(families: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Megatron checkpoints in fp32, one a variant, written by one process."""
    out = tmp_path_factory.mktemp("converted")
    (said,) = run_ranks(convert_all, 1, families, out, list(VARIANTS), "fp32")
    assert not any(text.startswith("FAILED") for text in said), said
    return out


def lost_on_the_way(families: Path, converted: Path, out: Path, dtype: str) -> dict[str, Any]:
    """Variant -> what of its source does not come back as it was, or as its cast to bf16."""
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        if dtype != "fp32":
            to_mcore(families / variant, converted / variant, dtype=dtype, verify=True)
        to_hf(converted / variant, out / variant, dtype=dtype, bytes_per_file=100_000)
        expected = weights(families / variant)
        if dtype == "bf16":
            kept = "e_score_correction_bias"
            expected = {name: t if name.endswith(kept) else t.bfloat16() for name, t in expected.items()}
        found[variant] = differing(weights(out / variant), expected)
    return found


def test_every_family_comes_back_bit_for_bit(families: Path, converted: Path, tmp_path: Path) -> None:
    (lost,) = run_ranks(lost_on_the_way, 1, families, converted, tmp_path, "fp32")
    assert lost == {variant: [] for variant in VARIANTS}


@pytest.mark.slow
def test_bf16_is_the_cast_of_the_source_but_for_the_bias_of_routers(families: Path, tmp_path: Path) -> None:
    (lost,) = run_ranks(lost_on_the_way, 1, families, tmp_path / "mcore", tmp_path / "hf", "bf16")
    assert lost == {variant: [] for variant in VARIANTS}


def loaded(kind: type[HiddenStatesModel], directory: Path, topology: Topology) -> ShardedModel:
    """A model whose every parameter must be overwritten, or it stays NaN."""
    settings = ModelConfig(path=str(directory), dtype="fp32")
    model = ShardedModel(kind, read_architecture(str(directory)), settings, topology, torch.device("cpu"))
    for tensor, _ in model.parameter_rules():
        nn.init.constant_(tensor, torch.nan)
    model.load(str(directory))
    return model


def load_at(families: Path, checkpoints: Path, variants: list[str], layout: Layout) -> dict[str, Any]:
    """Variant -> what differs from the source on this rank: of the policy streamed, its padding, a critic's body."""
    topology = start(layout)
    found: dict[str, Any] = {}
    for variant in variants:
        expected = weights(families / variant)
        policy_model = loaded(HiddenStatesModel, checkpoints / variant, topology)
        wrong = [*differing(streamed(policy_model), expected), *filled_padding(policy_model)]
        critic = loaded(ValueModel, checkpoints / variant, topology)
        for tensor, rule in critic.parameter_rules():
            size, rank = topology.cut(rule.axis)
            for piece in rule.pieces(size=size, rank=rank):
                if not torch.equal(tensor[slices(piece.target)], expected[piece.name][slices(piece.source)]):
                    wrong.append(f"critic {piece.name}")
        heads = [chunk.value_head.weight for chunk in critic.chunks if hasattr(chunk, "value_head")]
        wrong += ["value_head" for head in heads if head.any()]
        found[variant] = wrong
    return found


def filled_padding(model: ShardedModel) -> list[str]:
    """Parameters with a row beyond the vocabulary that is not 0."""
    topology, wrong = model.topology, []
    for tensor, rule in model.parameter_rules():
        if rule.padded:
            rows = range(topology.tp_rank * len(tensor), (topology.tp_rank + 1) * len(tensor))
            beyond = [number for number, row in enumerate(rows) if row >= model.arch.vocab_size]
            wrong += [rule.parameter] if tensor[beyond].ne(0).any() else []
    return wrong


def assert_loads(families: Path, checkpoints: Path, variants: list[str], layout: Layout) -> None:
    found = run_ranks(load_at, layout.num_ranks, families, checkpoints, variants, layout)
    assert found == [{variant: [] for variant in variants}] * layout.num_ranks


@pytest.mark.parametrize(
    ("variant", "layout"),
    [("llama-3-tied-1-kv-head", TP2), ("qwen2-yarn", PP2), ("deepseek-v3", TP2_EP2), ("qwen3-moe-mixed", VPP2)],
    ids=str,
)
def test_a_converted_checkpoint_loads(families: Path, converted: Path, variant: str, layout: Layout) -> None:
    assert_loads(families, converted, [variant], layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(1, {}), TP2, PP2, TP2_PP2, VPP2], ids=str)
def test_dense_checkpoints_load_at_every_layout(families: Path, converted: Path, layout: Layout) -> None:
    assert_loads(families, converted, DENSE, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, TP2_PP2, VPP2, EP2, EP4, TP2_EP2, TP2_EP2_ETP2], ids=str)
def test_checkpoints_with_experts_load_at_every_layout(families: Path, converted: Path, layout: Layout) -> None:
    assert_loads(families, converted, MOE, layout)


def refused(directory: Path, layout: Layout) -> str:
    topology = start(layout)
    try:
        loaded(HiddenStatesModel, directory, topology)
    except ValueError as error:
        return str(error)
    return ""


def test_what_one_stage_misses_is_told_on_every_rank(converted: Path, tmp_path: Path) -> None:
    """The last layer's router is the second stage's business alone."""
    directory = shutil.copytree(converted / "deepseek-v3", tmp_path / "deepseek-v3")
    metadata = read_metadata(directory)
    del metadata.state_dict_metadata["decoder.layers.3.mlp.router.weight"]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    found = run_ranks(refused, 2, directory, PP2, timeout_s=30)
    assert found == [f"{directory}: has no tensor decoder.layers.3.mlp.router.weight"] * 2


def save_at(source: str, layout: Layout, out: str) -> None:
    """As a run does: weights with the optimizer's state."""
    from rlmegatron.checkpoint.tensors import _give_every_parameter_state, save_tensors

    actor = policy(source, start(layout))
    _give_every_parameter_state(actor.training)
    Path(out).mkdir(exist_ok=True)
    save_tensors(actor.model, actor.training, Path(out))


def lost_from_a_run(source: Path, checkpoint: Path, out: Path) -> tuple[str, list[str]]:
    said = to_hf(checkpoint, out, hf_config=source)
    return said, differing(weights(out), weights(source))


def assert_a_run_s_checkpoint_converts(source: Path, layout: Layout, out: Path) -> None:
    run_ranks(save_at, layout.num_ranks, str(source), layout, str(out / "saved"))
    ((said, lost),) = run_ranks(lost_from_a_run, 1, source, out / "saved", out / "hf")
    assert lost == []
    assert re.search(r"left out \d+ tensors of the optimizer\n", said)


def test_a_run_s_checkpoint_converts_bit_for_bit(families: Path, tmp_path: Path) -> None:
    """Qwen3's tied vocabulary is padded to 48 rows there, and to 40 in a model that is not cut."""
    assert_a_run_s_checkpoint_converts(families / "qwen3", TP2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "layout", "other"), [("qwen3", TP2_PP2, VPP2), ("deepseek-v3", EP2, TP2_EP2)])
def test_checkpoints_of_other_layouts_convert_and_load_elsewhere(
    families: Path, tmp_path: Path, variant: str, layout: Layout, other: Layout
) -> None:
    assert_a_run_s_checkpoint_converts(families / variant, layout, tmp_path)
    (tmp_path / "saved").rename(tmp_path / variant)
    shutil.copy(families / variant / "config.json", tmp_path / variant)
    assert_loads(families, tmp_path, [variant], other)


def save_with_megatron(families: Path, out: Path, variants: list[str]) -> None:
    from megatron.core import dist_checkpointing

    topology = start(Layout(1, {}))
    for variant in variants:
        model = loaded(HiddenStatesModel, families / variant, topology)
        (out / variant).mkdir()
        dist_checkpointing.save({"chunk_0": model.chunks[0].sharded_state_dict()}, str(out / variant))


def assert_as_megatron_writes_it(families: Path, converted: Path, out: Path, variants: list[str]) -> None:
    run_ranks(save_with_megatron, 1, families, out, variants)
    for variant in variants:
        ours, megatrons = describe(converted / variant), describe(out / variant)
        # From 0.18 on, what is no tensor lies among the tensors; Megatron still reads it from the file that we write.
        megatrons.pop("common_state/shard_0_1", None)
        assert ours == megatrons
        assert any(key.endswith("_extra_state") or "_extra_state/" in key for key in ours)


def test_keys_shapes_types_and_boxes_are_those_that_megatron_writes(
    families: Path, converted: Path, tmp_path: Path
) -> None:
    """Llama's layers are stacked along a first dimension; DeepSeek's, being of two kinds, are not."""
    assert_as_megatron_writes_it(families, converted, tmp_path, ["llama", "deepseek-v3"])
    llama, deepseek = describe(converted / "llama"), describe(converted / "deepseek-v3")
    assert llama["decoder.layers.mlp.linear_fc2.weight"][1] == (4, 32, 48)
    assert deepseek["decoder.layers.0.mlp.linear_fc2.weight"][1] == (32, 48)


@pytest.mark.slow
def test_every_family_is_written_as_megatron_writes_it(families: Path, converted: Path, tmp_path: Path) -> None:
    assert_as_megatron_writes_it(families, converted, tmp_path, list(VARIANTS))


def there_and_back(source: Path, out: Path) -> None:
    said = [to_mcore(source, out / "mcore", verify=True), to_hf(out / "mcore", out / "hf", bytes_per_file=100_000)]
    assert not any(text.startswith("FAILED") for text in said), said


def test_two_processes_write_what_one_writes(families: Path, tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        run_ranks(there_and_back, num_ranks, families / "deepseek-v3", tmp_path / str(num_ranks))
    assert contents(tmp_path / "1/mcore") == contents(tmp_path / "2/mcore")
    assert contents(tmp_path / "1/hf") == contents(tmp_path / "2/hf")
    assert len(list((tmp_path / "1/hf").glob("*.safetensors"))) > 2
