"""Experts that a micro-batch prescribes, and what each rank's routers are told about it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlmegatron.config.schema import MoeConfig
from rlmegatron.data.batch import FREE, TrainBatch, assemble
from rlmegatron.learner.expert_routing import ExpertRouting
from rlmegatron.learner.micro_batch import pack_all
from rlmegatron.learner.router import choose, replayed, score, weigh
from rlmegatron.learner.routing import Routing
from rlmegatron.models.architecture import Experts
from rlmegatron.types import Prompt, RoutedExperts, Sample, SampleGroup

T, E, K = 50, 16, 4
V3_GROUPS = {"num_groups": 4, "top_groups": 2, "group_best": 2}
FAMILIES = {
    "qwen3-moe": {"normalize": True},
    "qwen3-moe, not normalised": {"normalize": False},
    "deepseek-v2": {"normalize": False, "scale": 16.0, "num_groups": 8, "top_groups": 3},
    "deepseek-v3": {"scoring": "sigmoid", "scale": 2.5, "bias": True, **V3_GROUPS},
}
CPU = torch.device("cpu")


def experts(family: str) -> Experts:
    return Experts(num=E, top_k=K, ffn=8, layers=(0,), **FAMILIES[family])  # type: ignore[arg-type]


def random_logits() -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(0)) * 2


def random_experts() -> Tensor:
    """[T K], distinct within a token."""
    return torch.rand(T, E, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :K]


def bias_of(spec: Experts) -> Tensor | None:
    return torch.linspace(-0.3, 0.4, E).roll(5) if spec.bias else None


def replay(logits: Tensor, wanted: Tensor, spec: Experts) -> tuple[Tensor, Tensor]:
    """(weights, map) of `wanted`."""
    scores, bias = score(logits, spec), bias_of(spec)
    choice = scores if bias is None else scores + bias
    return weigh(scores, replayed(wanted, choose(scores, bias, spec), choice), spec)


def by_hand(logits: Tensor, wanted: Tensor, spec: Experts) -> Tensor:
    """[T E] weights, token by token."""
    rows = []
    for row, chosen in zip(logits, wanted, strict=True):
        if spec.scoring == "sigmoid":
            values = row[chosen].sigmoid()
            values = values / values.sum()
        elif spec.normalize:
            values = row[chosen].softmax(-1)  # as Mixtral writes it
        else:
            values = row.softmax(-1)[chosen]
        rows.append(torch.zeros(E).index_put((chosen,), values * spec.scale))
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_prescribed_experts_are_weighed_by_the_routers_own_scores_with_their_gradients(family: str) -> None:
    """Groups do not bind them, and the bias does not enter."""
    spec, wanted = experts(family), random_experts()
    pull = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    found, expected = (random_logits().requires_grad_() for _ in range(2))
    weights, is_chosen = replay(found, wanted, spec)
    reference = by_hand(expected, wanted, spec)
    torch.testing.assert_close(weights, reference, rtol=1e-5, atol=1e-7)
    assert torch.equal(is_chosen, torch.zeros(T, E, dtype=torch.bool).scatter(1, wanted, True))
    (weights * pull).sum().backward()
    (reference * pull).sum().backward()
    assert found.grad is not None and float(found.grad.abs().max()) > 1e-3
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_choice_in_any_order_changes_no_bit(family: str) -> None:
    spec, logits = experts(family), random_logits()
    own = choose(score(logits, spec), bias_of(spec), spec)
    expected = weigh(score(logits, spec), own, spec)[0]
    for order in ([3, 1, 0, 2], [0, 2, 3, 1]):
        assert torch.equal(replay(logits, own[:, order], spec)[0], expected)


def test_a_token_without_prescribed_experts_keeps_its_own() -> None:
    spec, logits, wanted = experts("qwen3-moe"), random_logits(), random_experts()
    wanted[::3] = FREE
    free = weigh(score(logits, spec), choose(score(logits, spec), None, spec), spec)[0]
    forced = replay(logits, random_experts(), spec)[0]
    found = replay(logits, wanted, spec)[0]
    assert torch.equal(found[::3], free[::3])
    assert torch.equal(found[1::3], forced[1::3])


def batch_with_experts() -> TrainBatch:
    """Sequences of 4, 1 and 4 tokens; layer l of token t of the batch goes to experts (t + l, t + l + 1)."""
    groups, first = [], 0
    for number, (prompt, answer) in enumerate([((5, 6), (7, 8)), ((9,), ()), ((1, 2, 3), (4,))]):
        num_read = len(prompt) + len(answer) - 1
        table = torch.arange(first, first + num_read)[:, None, None] + torch.arange(3)[:, None] + torch.arange(2)
        told = RoutedExperts(table.short().numpy().tobytes(), num_read, 3, 2)
        sample = Sample(
            number, 0, answer, (-1.0,) * len(answer), (0,) * len(answer), "stop", "", reward=0.0, routed_experts=told
        )
        groups.append(SampleGroup(Prompt(number, prompt, "", {}, ""), (sample,)))
        first += num_read + 1
    return assemble(groups)


def told_to(batches: list[TrainBatch], *, layers: list[int], **topology: Any) -> list[Routing]:
    """What the routers of one rank are told when they only score."""
    alone = {"tp": 1, "vpp": 1, "tp_rank": 0, "tp_group": "tp", "sequence_parallel": False}
    sizes = SimpleNamespace(**alone | topology)
    routers: Any = [SimpleNamespace(layer=layer, experts=SimpleNamespace(top_k=2)) for layer in layers]
    settings = MoeConfig(router_replay=True)
    routing = ExpertRouting(routers, num_experts=16, settings=settings, topology=sizes)  # type: ignore[arg-type]
    packed = [inputs.sequences for inputs in pack_all(batches, sizes, CPU)]  # type: ignore[arg-type]
    routing.tell(batches, packed, learns=False)
    return [sequences.routing for sequences in packed if sequences.routing is not None]


def test_routers_are_told_sequences_and_the_experts_of_their_own_layers() -> None:
    (told,) = told_to([batch_with_experts()], layers=[1])
    assert told.sequence.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2] and told.lengths.tolist() == [4, 1, 4]
    assert told.wanted is not None and list(told.wanted) == [1]
    free = [-1, -1]
    assert told.wanted[1].tolist() == [[1, 2], [2, 3], [3, 4], free, free, [6, 7], [7, 8], [8, 9], free]
    assert told.counted.all() and not told.learns and told.balance_weight == 0 and told.group is None


def test_each_rank_is_told_of_its_slice_and_filler_counts_for_nothing() -> None:
    """9 tokens are filled up to 12 for 4 ranks; a dummy of 2 tokens to 4."""
    batch = batch_with_experts()
    last, idle = told_to([batch, batch.dummy(2)], layers=[0, 2], tp=4, tp_rank=3, sequence_parallel=True)
    assert last.sequence.tolist() == [4, 4, 4] and last.lengths.tolist() == [4, 1, 4, 3] and last.group == "tp"
    assert not last.counted.any() and not idle.counted.any() and idle.lengths.tolist() == [2, 2]
    assert last.wanted is not None and (last.wanted[2] == FREE).all()
    third, _ = told_to([batch, batch.dummy(2)], layers=[0, 2], tp=4, tp_rank=2, sequence_parallel=True)
    assert third.sequence.tolist() == [2, 2, 2] and third.wanted is not None
    assert third.wanted[0].tolist() == [[6, 7], [7, 8], [-1, -1]]
    assert third.wanted[2].tolist() == [[8, 9], [9, 10], [-1, -1]]


def test_a_rank_that_got_no_samples_routes_its_dummies_freely() -> None:
    (told,) = told_to([assemble([]).dummy(2)], layers=[0, 2])
    assert told.wanted is not None and told.wanted[2].tolist() == [[FREE, FREE], [FREE, FREE]]
    assert not told.counted.any()


def test_a_batch_that_does_not_say_is_our_own_mistake() -> None:
    batch = batch_with_experts()
    with pytest.raises(AssertionError, match="does not say which experts"):
        told_to([dataclasses.replace(batch, routed_experts=None)], layers=[0])
    assert batch.routed_experts is not None
    batch.routed_experts[0, 0, 0] = 16
    with pytest.raises(AssertionError, match="the engine names expert 16"):
        told_to([batch], layers=[0])


def test_a_repeated_note_replaces_the_first() -> None:
    told, nothing = Routing(torch.zeros(2, dtype=torch.int64), torch.tensor([2])), torch.tensor(0.0)
    for _ in range(2):
        told.note(5, load=torch.tensor([2, 0]), balance=torch.tensor(1.5), differing=nothing, replayed=nothing)
    assert told.notes[5].tolist() == [2, 0, 1.5, 0, 0]
