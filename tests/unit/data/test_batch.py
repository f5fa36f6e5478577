"""TrainBatch against slow loops over tokens and sequences."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.data.batch import SCORES, TrainBatch, assemble, concat
from rlmegatron.types import Prompt, RoutedExperts, Sample, SampleGroup


def make_groups(shape: list[tuple[int, list[int]]], *, seed: int = 0) -> list[SampleGroup]:
    """Groups from [(prompt length, answer lengths)], with random tokens, log-probs and rewards."""
    generator = random.Random(seed)

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(generator.randrange(1, 50000) for _ in range(num))

    groups = []
    for number, (prompt_length, answer_lengths) in enumerate(shape):
        prompt = Prompt(100 + number, tokens(prompt_length), "p", {}, f"f line {number + 1}")
        samples = [
            Sample(
                prompt_id=prompt.id,
                index=index,
                token_ids=tokens(length),
                logprobs=tuple(-generator.random() for _ in range(length)),
                weight_versions=(0,) * length,
                finish_reason="stop",
                text="t",
                reward=generator.random(),
            )
            for index, length in enumerate(answer_lengths)
        ]
        groups.append(SampleGroup(prompt, tuple(samples)))
    return groups


def slow_sequences(groups: list[SampleGroup]) -> list[dict[str, Any]]:
    """Every sequence as lists, token by token."""
    result: list[dict[str, Any]] = []
    for group in groups:
        for sample in group.samples:
            one: dict[str, Any] = {"tokens": [], "loss_mask": [], "rollout_logp": []}
            for token in group.prompt.token_ids:
                one["tokens"].append(token)
                one["loss_mask"].append(False)
                one["rollout_logp"].append(0.0)
            for token, logp in zip(sample.token_ids, sample.logprobs, strict=True):
                one["tokens"].append(token)
                one["loss_mask"].append(True)
                one["rollout_logp"].append(logp)
            result.append({**one, "group_ids": group.prompt.id, "rewards": sample.reward, "sample_ids": len(result)})
    return result


def assert_holds(batch: TrainBatch, sequences: list[dict[str, Any]]) -> None:
    """The batch is exactly these sequences."""
    assert batch.num_sequences == len(sequences)
    assert batch.num_tokens == sum(len(one["tokens"]) for one in sequences)
    assert batch.cu_seqlens.dtype == torch.int32
    for n, expected in enumerate(sequences):
        start, end = int(batch.cu_seqlens[n]), int(batch.cu_seqlens[n + 1])
        assert batch.tokens[start:end].tolist() == expected["tokens"]
        assert batch.loss_mask[start:end].tolist() == expected["loss_mask"]
        assert batch.rollout_logp[start:end].tolist() == torch.tensor(expected["rollout_logp"]).tolist()
        assert batch.positions[start:end].tolist() == list(range(end - start))
        assert batch.sequence_index[start:end].tolist() == [n] * (end - start)
        for name in ("sample_ids", "group_ids"):
            assert int(getattr(batch, name)[n]) == expected[name]
        assert float(batch.rewards[n]) == pytest.approx(expected["rewards"])


shapes = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), max_size=4)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_assembled_batches_equal_a_loop_over_tokens(shape: list[tuple[int, list[int]]], seed: int) -> None:
    groups = make_groups(shape, seed=seed)
    batch = assemble(groups)
    assert_holds(batch, slow_sequences(groups))
    assert batch.tokens.dtype == torch.int64 and batch.rollout_logp.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(shapes, st.data())
def test_selection_gathers_whole_sequences_in_the_asked_order(shape: list[tuple[int, list[int]]], data: Any) -> None:
    groups = make_groups(shape)
    sequences = slow_sequences(groups)
    batch = assemble(groups)
    batch = batch.with_tensors(old_logp=2 * batch.rollout_logp)
    indices = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=8)) if sequences else []
    picked = batch.select(indices)
    assert_holds(picked, [sequences[index] for index in indices])
    assert picked.scores("old_logp").equal(2 * picked.rollout_logp)
    cut = data.draw(st.integers(0, len(sequences)))
    halves = [batch.select(range(cut)), batch.select(range(cut, len(sequences)))]
    assert_holds(concat(halves), sequences)
    assert concat(halves).scores("old_logp").equal(batch.scores("old_logp"))


def test_selecting_micro_batches_and_sorting_back_restores_the_batch() -> None:
    groups = make_groups([(3, [2, 0, 5]), (1, [4])])
    batch = assemble(groups, first_sample_id=10)
    shuffled = concat([batch.select([2, 0]), batch.select([3, 1])])
    restored = shuffled.select(shuffled.sample_ids.argsort())
    assert restored.sample_ids.tolist() == [10, 11, 12, 13]
    assert restored.tokens.equal(batch.tokens) and restored.cu_seqlens.equal(batch.cu_seqlens)


def test_equal_prompts_stay_two_groups() -> None:
    (one,) = make_groups([(2, [1, 1])])
    twin_prompt = Prompt(999, one.prompt.token_ids, one.prompt.text, {}, "f line 2")
    twin_samples = tuple(
        Sample(999, s.index, s.token_ids, s.logprobs, (0,), "stop", s.text, s.reward) for s in one.samples
    )
    batch = assemble([one, SampleGroup(twin_prompt, twin_samples)])
    assert batch.group_ids.tolist() == [100, 100, 999, 999]


def test_tensors_are_zero_outside_the_answer() -> None:
    batch = assemble(make_groups([(2, [3])]))
    scored = batch.with_tensors(values=torch.tensor([float("nan"), 7.0, 1.0, 2.0, 3.0]))
    assert scored.scores("values").tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]
    assert batch.score_names == () and scored.score_names == ("values",)
    assert scored.with_tensors(values=torch.ones(5)).scores("values").tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"old_lgp": torch.zeros(5)}, "'old_lgp' is no per-token tensor of a batch, must be one of old_logp"),
        ({"tokens": torch.zeros(5)}, "'tokens' is no per-token tensor"),
        ({"old_logp": torch.zeros(4)}, r"old_logp has shape \(4,\), must be \(5,\)"),
        ({"old_logp": torch.zeros(1, 5)}, r"old_logp has shape \(1, 5\)"),
        ({"old_logp": torch.zeros(5, dtype=torch.int64)}, "old_logp is torch.int64 on cpu, must be floating on cpu"),
        ({"old_logp": torch.zeros(5, device="meta")}, "old_logp is torch.float32 on meta"),
        ({"old_logp": torch.zeros(5, requires_grad=True)}, "old_logp carries a graph"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(named: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(make_groups([(2, [3])])).with_tensors(**named)


def test_a_missing_score_says_which_are_there() -> None:
    batch = assemble(make_groups([(2, [3])])).with_tensors(values=torch.zeros(5))
    with pytest.raises(ValueError, match="the batch has no 'advantages'; it has values"):
        batch.scores("advantages")


def test_a_dummy_has_the_same_tensors_and_nothing_to_learn() -> None:
    batch = assemble(make_groups([(2, [3])]))
    batch = batch.with_tensors(**{name: torch.ones(5) for name in SCORES})
    dummy = batch.dummy(4)
    assert dummy.cu_seqlens.tolist() == [0, 4] and dummy.score_names == SCORES
    assert not dummy.loss_mask.any() and dummy.tokens.tolist() == [0] * 4 and dummy.tokens.dtype == torch.int64
    assert dummy.scores("advantages").tolist() == [0.0] * 4
    assert (dummy.sample_ids.item(), dummy.group_ids.item(), dummy.rewards.item()) == (-1, -1, 0.0)
    assert concat([batch, dummy]).num_sequences == 2


def test_moving_a_batch_moves_every_tensor() -> None:
    batch = assemble(with_experts(make_groups([(2, [3])])))
    moved = batch.with_tensors(**{name: torch.ones(5) for name in SCORES}).to("meta")
    assert {getattr(moved, name).device.type for name in TrainBatch.__slots__} == {"meta"}


def test_batches_with_different_tensors_are_not_joined() -> None:
    batch = assemble(make_groups([(2, [3])]))
    with pytest.raises(ValueError, match="concat: one batch has the tensors"):
        concat([batch, batch.with_tensors(values=torch.zeros(5))])
    with pytest.raises(ValueError, match="at least one batch"):
        concat([])


def with_experts(groups: list[SampleGroup]) -> list[SampleGroup]:
    """The token at position t of a sequence, but for its last, goes to experts 100 l + t and 100 l - t in layer l."""

    def told(prompt: Prompt, sample: Sample) -> RoutedExperts:
        num_read = len(prompt.token_ids) + len(sample.token_ids) - 1
        table = [[[100 * layer + t, 100 * layer - t] for layer in range(3)] for t in range(num_read)]
        return RoutedExperts(np.array(table, dtype=np.int16).tobytes(), num_read, 3, 2)

    return [
        dataclasses.replace(
            group,
            samples=tuple(dataclasses.replace(one, routed_experts=told(group.prompt, one)) for one in group.samples),
        )
        for group in groups
    ]


def test_experts_lie_with_their_tokens_and_the_last_token_of_a_sequence_is_free() -> None:
    batch = assemble(with_experts(make_groups([(2, [3, 0]), (1, [0, 1])])))
    whole = concat([batch.select([2, 0]), batch.dummy(2), batch.select([3, 1])])
    assert whole.routed_experts is not None and whole.routed_experts.dtype == torch.int16
    bounds = whole.cu_seqlens.tolist()
    assert [stop - start for start, stop in itertools.pairwise(bounds)] == [1, 5, 2, 2, 2]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for t in range(stop - start):
            is_free = t == stop - start - 1 or number == 2
            expected = [[-1, -1] if is_free else [100 * layer + t, 100 * layer - t] for layer in range(3)]
            assert whole.routed_experts[start + t].tolist() == expected


def test_either_every_sample_tells_its_experts_or_none() -> None:
    groups = make_groups([(2, [3]), (2, [3])])
    assert assemble(groups).routed_experts is None
    with pytest.raises(AssertionError, match="1 of 2 samples tell which experts"):
        assemble([groups[0], *with_experts(groups[1:])])
    with pytest.raises(ValueError, match="concat: one batch has the tensors"):
        concat([assemble(groups), assemble(with_experts(groups))])


def test_an_unjudged_sample_or_a_foreign_one_is_our_own_mistake() -> None:
    (group,) = make_groups([(2, [3])])
    (sample,) = group.samples
    for wrong, message in (
        (dataclasses.replace(sample, reward=None), "sample 0 of prompt 100 was not judged"),
        (dataclasses.replace(sample, prompt_id=7), "answers prompt 7"),
        (dataclasses.replace(sample, logprobs=()), "another number of log-probs"),
    ):
        with pytest.raises(AssertionError, match=message):
            assemble([dataclasses.replace(group, samples=(wrong,))])
