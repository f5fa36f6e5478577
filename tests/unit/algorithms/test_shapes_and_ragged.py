"""Shapes are checked with messages that name the tensor, and ragged bounds are what an obvious loop says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmegatron.algorithms.ragged import broadcast_to_tokens, counted_per_sequence, sequence_ids
from rlmegatron.algorithms.shapes import expect

LENGTHS = st.lists(st.integers(0, 5), max_size=6)


def bounds(lengths):
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def test_a_letter_has_one_size_within_a_call():
    with pytest.raises(ValueError, match=r"advantages must have shape \[T\] with T=4 from logp, got \[5\]"):
        expect("T", logp=torch.zeros(4), advantages=torch.zeros(5))


@pytest.mark.parametrize(
    ("pattern", "shape"), [("T", (2, 2)), ("3", (2,)), ("N+1", (0,)), ("B 3", (4, 2)), ("B B", (2, 3))]
)
def test_a_wrong_shape_is_named(pattern, shape):
    with pytest.raises(ValueError, match="^x must have shape"):
        expect(pattern, x=torch.zeros(shape))


def test_sizes_come_back_in_order_of_the_letters():
    assert expect("B G 3", x=torch.zeros(2, 5, 3)) == (2, 5)
    assert expect("N+1", x=torch.zeros(1)) == (0,)


@pytest.mark.parametrize("cu_seqlens", [[1, 4], [0, 3], [0, 5], [0, 3, 2, 4]])
def test_bounds_that_do_not_cover_the_tokens_are_refused(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens"):
        sequence_ids(torch.tensor(cu_seqlens), 4)


@given(LENGTHS, st.data())
@settings(max_examples=60, deadline=None)
def test_ragged_arithmetic_is_what_a_loop_says(lengths, data):
    num_tokens = sum(lengths)
    flags = data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    mask, cu_seqlens = torch.tensor(flags, dtype=torch.bool), bounds(lengths)
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    assert sequence_ids(cu_seqlens, num_tokens).tolist() == owner
    assert counted_per_sequence(mask, cu_seqlens).tolist() == [
        sum(flags[t] for t in range(num_tokens) if owner[t] == i) for i in range(len(lengths))
    ]
    per_sample = torch.arange(1.0, len(lengths) + 1)
    assert broadcast_to_tokens(per_sample, cu_seqlens, mask).tolist() == [
        float(owner[t] + 1) if flags[t] else 0.0 for t in range(num_tokens)
    ]


def test_per_sample_numbers_must_match_the_sequences():
    with pytest.raises(ValueError, match="per_sample has 3 entries, but cu_seqlens delimits 2 sequences"):
        broadcast_to_tokens(torch.zeros(3), torch.tensor([0, 1, 2]), torch.ones(2, dtype=torch.bool))
