"""One packed micro-batch as the model takes it: sequences end to end, with filler only where Megatron demands a length.

In: a `TrainBatch`. Out: token ids, positions, sequence bounds, and which hidden state predicts which token. Must never
communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmegatron.data.batch import TrainBatch
from rlmegatron.learner.groups import Topology
from rlmegatron.learner.routing import RoutedSequences


@dataclass(frozen=True)
class PackedInputs:
    """T tokens of a micro-batch in one row; R of them are wanted (counted answer tokens).

    `predictors[r]` is the place of the hidden state that predicts wanted token r, `wanted[r]` that token's own place.
    """

    num_tokens: int
    tokens: Tensor
    positions: Tensor
    sequences: RoutedSequences
    predictors: Tensor
    wanted: Tensor
    labels: Tensor

    def spread(self, per_wanted: Tensor) -> Tensor:
        """[R] -> [T]: each value at its own token, 0 elsewhere."""
        return per_wanted.new_zeros(self.num_tokens).index_put((self.wanted,), per_wanted)


def pack_all(batches: Sequence[TrainBatch], topology: Topology, device: torch.device) -> list[PackedInputs]:
    """Pack micro-batches of one schedule: lengths that sequence parallelism can cut, all equal when interleaved."""
    multiple = topology.tp if topology.sequence_parallel else 1
    lengths = [-(-batch.num_tokens // multiple) * multiple for batch in batches]
    if topology.vpp > 1:
        lengths = [max(lengths)] * len(lengths)
    return [pack(batch, length=length, device=device) for batch, length in zip(batches, lengths, strict=True)]


def pack(batch: TrainBatch, *, length: int, device: torch.device) -> PackedInputs:
    """Lay the batch out in one row of `length` tokens; the filler, if any, is a sequence of its own."""
    tokens, bounds = batch.tokens.to(device), batch.cu_seqlens.to(device)
    num_tokens = len(tokens)
    filler = length - num_tokens
    if filler:
        tokens = torch.cat([tokens, tokens.new_zeros(filler)])
        bounds = torch.cat([bounds, bounds.new_tensor([length])])
    lengths = bounds.diff()
    starts = torch.repeat_interleave(bounds[:-1], lengths)
    wanted = batch.loss_mask.to(device).nonzero().flatten()
    longest = int(lengths.max())
    bounds = bounds.int()
    return PackedInputs(
        num_tokens=num_tokens,
        tokens=tokens.long()[None],
        positions=(torch.arange(len(tokens), device=device) - starts)[None],
        sequences=RoutedSequences(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        predictors=wanted - 1,
        wanted=wanted,
        labels=tokens.long()[wanted],
    )
