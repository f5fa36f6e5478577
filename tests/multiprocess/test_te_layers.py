"""Layers of Transformer Engine's modules have the parameters that the rules name, and the checkpoints of ours.

Megatron's own classes are built from its own specs on a stand-in for the engine. What this does not prove: that the
engine computes the same numbers, or that its releases other than the stand-in's have these parameters.
"""

from __future__ import annotations

import itertools
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import VARIANTS, has_experts, write_variant
from ranks import run_ranks
from safetensors.torch import load_file
from sharded import CPU, Layout

from rlmegatron.models.rules import on_stage
from rlmegatron.models.table import read_architecture

DENSE = [name for name in VARIANTS if not has_experts(name)]
MOE = [name for name in VARIANTS if has_experts(name)]
TP2 = Layout(2, {"tensor": 2, "sequence": True})
TP2_EP2 = Layout(2, {"tensor": 2, "expert": 2, "sequence": True})
PP2_EP2_ETP2 = Layout(8, {"pipeline": 2, "expert": 2, "expert_tensor": 2})
Found = dict[str, dict[str, set[Any]]]
"""Variant -> what differs, by kind."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the real engine")


def compared(directory: str, layout: Layout, variants: list[str]) -> Found:
    """On this rank: names and shapes of the engine's layers against the rules, and both kinds' checkpoints."""
    if dist.get_rank() == 0:
        for variant in variants:
            write_variant(Path(directory) / variant, variant)
    dist.barrier()
    with_ours = checkpoint_keys(directory, layout, variants)
    from te_stand_in import install_transformer_engine

    install_transformer_engine()
    with_te = checkpoint_keys(directory, layout, variants)
    found = {variant: differences(f"{directory}/{variant}", layout) for variant in variants}
    for variant in variants:
        found[variant]["checkpoints"] = with_ours[variant] ^ with_te[variant]
    return found


def checkpoint_keys(directory: str, layout: Layout, variants: list[str]) -> dict[str, set[Any]]:
    """Variant -> (key, shape, this rank's offset and shape) of every tensor that this rank puts into a checkpoint."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found = {}
    for variant, model in models(directory, layout, variants):
        shards: list[Any] = []
        for item in itertools.chain(*(chunk.sharded_state_dict().values() for chunk in model.chunks)):
            shards += item.build() if isinstance(item, ShardedTensorFactory) else [item]
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        found[variant] = {(one.key, one.global_shape, one.global_offset, one.local_shape) for one in tensors}
        assert len(found[variant]) > 10
    return found


def differences(directory: str, layout: Layout) -> dict[str, set[Any]]:
    """Names with shapes that only the model or only the rules have, and tensors that a load and a stream change."""
    path, name = directory.rsplit("/", 1)
    ((_, model),) = models(path, layout, [name])
    arch, topology = model.arch, model.topology
    rules = arch.parameter_rules(topology.tp)
    experts = topology.local_experts(arch.experts.num) if arch.experts else None
    built, expected = set(), set()
    for number, chunk in enumerate(model.chunks):
        stage = topology.stages(arch.num_layers)[topology.pp_rank, number]
        for local, fused, rule in on_stage(rules, stage, experts):
            expected.add((fused or local, rule.local_shape(topology.cut(rule.axis)[0])))
        named = itertools.chain(chunk.named_parameters(), chunk.named_buffers())
        built |= {(key, tuple(tensor.shape)) for key, tensor in named if "tokens_per_expert" not in key}
    model.load(directory)
    buckets = model.tensor_stream().buckets(bytes_per_bucket=1 << 14, dtype=torch.float32, receive=True)
    out, source = dict(itertools.chain.from_iterable(buckets)), load_file(f"{directory}/model.safetensors")
    moved = {key for key in out.keys() | source.keys() if not torch.equal(out[key], source[key])}
    return {"built only": built - expected, "in rules only": expected - built, "changed": moved}


def models(directory: str, layout: Layout, variants: list[str]) -> Any:
    """(variant, unloaded model) with the learner as it is imported now."""
    from rlmegatron.config.schema import ModelConfig, ParallelConfig
    from rlmegatron.learner.build import HiddenStatesModel
    from rlmegatron.learner.groups import start_topology, stop_topology
    from rlmegatron.learner.model import ShardedModel

    topology = start_topology(ParallelConfig(**layout.parallel), seed=1, timeout_s=60)
    for variant in variants:
        arch = read_architecture(f"{directory}/{variant}")
        settings = ModelConfig(path=directory, dtype="fp32")
        yield variant, ShardedModel(HiddenStatesModel, arch, settings, topology, CPU)
    stop_topology()


def assert_alike(directory: Path, layout: Layout, variants: list[str]) -> None:
    of_ranks = run_ranks(compared, layout.num_ranks, str(directory), layout, variants)
    wrong = {
        (rank, variant, kind): sorted(map(str, names))[:5]
        for rank, found in enumerate(of_ranks)
        for variant, kinds in found.items()
        for kind, names in kinds.items()
        if names
    }
    assert not wrong


pytestmark = pytest.mark.skipif(
    not version("megatron-core").startswith("0.16."), reason="later releases ask more of Transformer Engine"
)


@pytest.mark.parametrize(("layout", "variants"), [(TP2, DENSE), (TP2_EP2, MOE)], ids=["dense", "experts"])
def test_te_layers_are_what_the_rules_say(tmp_path: Path, layout: Layout, variants: list[str]) -> None:
    assert_alike(tmp_path, layout, variants)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variants"),
    [(Layout(1, {}), list(VARIANTS)), (TP2, MOE), (PP2_EP2_ETP2, MOE)],
    ids=["alone", "tp2", "pp2-ep2-etp2"],
)
def test_te_layers_at_further_layouts(tmp_path: Path, layout: Layout, variants: list[str]) -> None:
    assert_alike(tmp_path, layout, variants)
