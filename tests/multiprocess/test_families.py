"""Every family at every layout: the same logits as transformers, and the same weights out as in, bit for bit.

What this does not prove: anything about Transformer Engine's modules, or models of real size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_models import VARIANTS, family_references, has_experts, sequences
from ranks import run_ranks
from safetensors.torch import load_file
from sharded import Layout, sharded_model, start, streamed
from torch import Tensor

from rlmegatron.data.batch import TrainBatch, assemble
from rlmegatron.learner.build import HiddenStatesModel
from rlmegatron.learner.model import ShardedModel
from rlmegatron.types import Prompt, Sample, SampleGroup

TOLERANCE = 1e-4
DENSE = [name for name in VARIANTS if not has_experts(name)]
MOE = [name for name in VARIANTS if has_experts(name)]
TP2 = Layout(2, {"tensor": 2, "sequence": True})
PP2 = Layout(2, {"pipeline": 2})
TP2_PP2 = Layout(4, {"tensor": 2, "pipeline": 2, "sequence": True})
VPP2 = Layout(2, {"pipeline": 2, "virtual_pipeline": 2})
EP2 = Layout(2, {"expert": 2})
EP4 = Layout(4, {"expert": 4})
TP2_EP2 = Layout(2, {"tensor": 2, "expert": 2, "sequence": True})
TP2_EP2_ETP2 = Layout(4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "sequence": True})
PP2_EP2_ETP2 = Layout(8, {"pipeline": 2, "expert": 2, "expert_tensor": 2})
TP4 = Layout(4, {"tensor": 4, "sequence": True})
UNEVEN = Layout(2, {"pipeline": 2, "first_stage_layers": 1})


@pytest.fixture(scope="session")
def logits(families: Path) -> dict[str, Tensor]:
    return run_ranks(family_references, 1, families)[0]


def batch_of_all() -> TrainBatch:
    """The sequences, packed; which tokens count does not matter here."""
    groups = []
    for number, tokens in enumerate(sequences()):
        answer = tuple(tokens[1:])
        sample = Sample(number, 0, answer, (-1.0,) * len(answer), (0,) * len(answer), "stop", "", reward=1.0)
        groups.append(SampleGroup(Prompt(number, (tokens[0],), "", {}, ""), (sample,)))
    return assemble(groups)


def whole_logits(model: ShardedModel) -> Tensor | None:
    """[tokens, vocabulary] on the last stage, from one packed micro-batch and an empty one."""
    topology, batch = model.topology, batch_of_all()

    def on_output(_: int, packed: Any, chunk: HiddenStatesModel, hidden: Tensor) -> Tensor:
        if topology.sequence_parallel:
            pieces = [torch.empty_like(hidden) for _ in range(topology.tp)]
            dist.all_gather(pieces, hidden.contiguous(), group=topology.tp_group)
            hidden = torch.cat(pieces)
        local = (hidden[: packed.num_tokens, 0] @ chunk.output_weight.t()).contiguous()
        shards = [torch.empty_like(local) for _ in range(topology.tp)]
        dist.all_gather(shards, local, group=topology.tp_group)
        return torch.cat(shards, dim=1)[:, : model.arch.vocab_size]

    found = model.run([batch, batch.dummy(2)], on_output, backward=False)
    return found[0] if found else None


def differences(directory: str, variants: list[str], layout: Layout, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Variant -> (largest difference of logits or None, names whose stream differs from the checkpoint)."""
    topology = start(layout)
    found: dict[str, Any] = {}
    for variant in variants:
        model = sharded_model(HiddenStatesModel, f"{directory}/{variant}", topology)
        logits = whole_logits(model)
        largest = None if logits is None else float((logits - expected[variant]).abs().max())
        source, out = load_file(f"{directory}/{variant}/model.safetensors"), streamed(model)
        wrong = source.keys() ^ out.keys()
        wrong |= {name for name in source.keys() & out.keys() if not torch.equal(source[name], out[name])}
        found[variant] = (largest, sorted(wrong))
    return found


def assert_equal(families: Path, logits: dict[str, Tensor], variants: list[str], layout: Layout) -> None:
    of_ranks = run_ranks(differences, layout.num_ranks, str(families), variants, layout, logits)
    assert [rank[variant][1] for rank in of_ranks for variant in variants] == [[]] * len(variants) * len(of_ranks)
    largest = {variant: [rank[variant][0] for rank in of_ranks if rank[variant][0] is not None] for variant in variants}
    assert all(values and max(values) < TOLERANCE for values in largest.values()), largest


@pytest.mark.parametrize("layout", [Layout(1, {}), TP2, PP2], ids=str)
def test_dense_families_equal_transformers(families: Path, logits: dict[str, Tensor], layout: Layout) -> None:
    assert_equal(families, logits, DENSE, layout)


@pytest.mark.parametrize("layout", [Layout(1, {}), EP2, TP2_EP2], ids=str)
def test_families_with_experts_equal_transformers(families: Path, logits: dict[str, Tensor], layout: Layout) -> None:
    assert_equal(families, logits, MOE, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2_PP2, VPP2, UNEVEN, TP4], ids=str)
def test_dense_families_at_further_layouts(families: Path, logits: dict[str, Tensor], layout: Layout) -> None:
    assert_equal(families, logits, DENSE, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2, TP2_PP2, VPP2, UNEVEN, EP4, TP2_EP2_ETP2, PP2_EP2_ETP2], ids=str)
def test_experts_at_further_layouts(families: Path, logits: dict[str, Tensor], layout: Layout) -> None:
    assert_equal(families, logits, MOE, layout)
