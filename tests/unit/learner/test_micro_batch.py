"""One packed micro-batch, checked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmegatron.data.batch import TrainBatch, assemble
from rlmegatron.learner.micro_batch import PackedInputs, pack, pack_all
from rlmegatron.types import Prompt, Sample, SampleGroup

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> TrainBatch:
    """[5 6 | 7 8] and [9 | ] and [1 2 3 | 4]: prompt | answer."""
    groups = []
    for number, (prompt, answer) in enumerate([((5, 6), (7, 8)), ((9,), ()), ((1, 2, 3), (4,))]):
        sample = Sample(number, 0, answer, (-1.0,) * len(answer), (0,) * len(answer), "stop", "", reward=0.0)
        groups.append(SampleGroup(Prompt(number, prompt, "", {}, ""), (sample,)))
    return assemble(groups)


def bounds(packed: PackedInputs) -> list[int]:
    assert packed.sequences.cu_seqlens_q is packed.sequences.cu_seqlens_kv
    return packed.sequences.cu_seqlens_q.tolist()


def test_sequences_lie_end_to_end(batch: TrainBatch) -> None:
    packed = pack(batch, length=9, device=CPU)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2, 3, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3]]
    assert bounds(packed) == [0, 4, 5, 9]
    assert packed.sequences.max_seqlen_q == 4 and packed.sequences.qkv_format == "thd"
    assert packed.sequences.cu_seqlens_q.dtype == torch.int32


def test_each_answer_token_is_predicted_by_the_state_before_it(batch: TrainBatch) -> None:
    packed = pack(batch, length=9, device=CPU)
    assert packed.wanted.tolist() == [2, 3, 8]
    assert packed.predictors.tolist() == [1, 2, 7]
    assert packed.labels.tolist() == [7, 8, 4]
    assert packed.spread(torch.tensor([10.0, 20.0, 30.0])).tolist() == [0, 0, 10, 20, 0, 0, 0, 0, 30]


def test_filler_is_a_sequence_of_its_own(batch: TrainBatch) -> None:
    """Nothing is predicted from it, and per-token results keep the length of the batch."""
    packed = pack(batch, length=12, device=CPU)
    assert bounds(packed) == [0, 4, 5, 9, 12]
    assert packed.tokens[0, 9:].tolist() == [0, 0, 0] and packed.positions[0, 9:].tolist() == [0, 1, 2]
    assert packed.num_tokens == 9 and packed.wanted.tolist() == [2, 3, 8]
    assert packed.spread(torch.ones(3)).shape == (9,)


def test_spread_carries_gradients(batch: TrainBatch) -> None:
    values = torch.zeros(3, requires_grad=True)
    (pack(batch, length=9, device=CPU).spread(values) * torch.arange(9)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2, 3, 8]


@pytest.mark.parametrize(
    ("topology", "lengths"),
    [
        ({"tp": 4, "sequence_parallel": False, "vpp": 1}, [9, 5, 2]),
        ({"tp": 4, "sequence_parallel": True, "vpp": 1}, [12, 8, 4]),
        ({"tp": 2, "sequence_parallel": False, "vpp": 2}, [9, 9, 9]),
        ({"tp": 2, "sequence_parallel": True, "vpp": 2}, [10, 10, 10]),
    ],
)
def test_lengths_are_what_megatron_demands(batch: TrainBatch, topology: dict[str, Any], lengths: list[int]) -> None:
    """Divisible by TP under sequence parallelism; equal in the interleaved schedule."""
    parts = [batch, batch.select([0, 1]), batch.dummy(2)]
    packed = pack_all(parts, SimpleNamespace(**topology), CPU)  # type: ignore[arg-type]
    assert [inputs.tokens.shape[1] for inputs in packed] == lengths
    assert packed[2].wanted.tolist() == []
