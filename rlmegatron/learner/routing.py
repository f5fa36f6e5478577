"""What routers are told about one micro-batch, and its way to them through Megatron's layers.

In: the micro-batch's sequences and the experts to use. Out: `Routing`, which rides on the sequence parameters that
Megatron hands to every layer, also when it computes a layer again in the backward pass. Must never know of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


# T tokens that this rank's routers see (its slice under sequence parallelism), N sequences with filler and dummies,
# E experts, K experts of a token
@dataclass(eq=False)
class Routing:
    """One micro-batch as routers see it; layers have their numbers among all layers with experts.

    `sequence` [T] is the number of each token's sequence, N for tokens that do not count (filler, dummies); `lengths`
    [N] are in tokens. `wanted` holds, by layer, the experts to use [T K], FREE where the router chooses. With `learns`
    routers note in `notes` what they did, and add to the loss `balance_weight` times the balance of the sequences,
    which lie cut over `group`, if over any.
    """

    sequence: Tensor
    lengths: Tensor
    wanted: Mapping[int, Tensor] | None = None
    learns: bool = False
    balance_weight: float = 0.0
    group: dist.ProcessGroup | None = None
    notes: dict[int, Tensor] = field(default_factory=dict)

    @property
    def counted(self) -> Tensor:
        """[T] bool: the tokens of real sequences."""
        return self.sequence < len(self.lengths)

    def note(self, layer: int, *, load: Tensor, balance: Tensor, differing: Tensor, replayed: Tensor) -> None:
        """Keep what `layer` did, in place of what it noted before, so that nothing counts twice.

        load: [E] tokens sent to each expert. balance: this rank's part of the sum over sequences. differing, replayed:
        choices of the engine that are not the router's own, and all of them.
        """
        others = [value.detach().double().reshape(1) for value in (balance, differing, replayed)]
        self.notes[layer] = torch.cat([load.double(), *others])


@dataclass
class RoutedSequences(PackedSeqParams):
    """Megatron's sequence parameters with what routers are told; with None they route as in inference."""

    routing: Routing | None = None
