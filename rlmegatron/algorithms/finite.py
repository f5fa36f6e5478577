"""Owns the check that rewards are finite numbers, and the words that name the sample or token of one that is not.

In: rewards per sample or per counted token; out: nothing, or a ValueError. Must never import torch.distributed, the
configuration, or another package of ours.
"""

# N samples, T tokens of all sequences, C counted tokens

from __future__ import annotations

import torch
from torch import Tensor


def check_rewards(rewards: Tensor, group_ids: Tensor | None = None, *, name: str = "reward") -> None:
    """Raise ValueError unless `rewards` [N] are floating and finite; it names the first sample and its group.

    `name` is what one of them is called in the message; group_ids: [N], or None where they are not known.

    >>> check_rewards(torch.tensor([0.5, float("nan")]), torch.tensor([7, 7]))
    Traceback (most recent call last):
    ValueError: reward of sample 1 (group 7) is nan
    """
    if not rewards.is_floating_point():
        raise ValueError(f"{name}s must be floating, got {rewards.dtype}")
    index = _first_not_finite(rewards)
    if index is not None:
        group = "" if group_ids is None else f" (group {int(group_ids[index])})"
        raise ValueError(f"{name} of sample {index}{group} is {float(rewards[index])}")


def check_token_rewards(counted_rewards: Tensor, mask: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless all rewards of counted tokens are finite; it names the first token and its sequence.

    counted_rewards: [C], those where `mask` [T] is True. ids: [C] number of each one's sequence.
    """
    index = _first_not_finite(counted_rewards)
    if index is not None:
        token = int(mask.nonzero()[index])
        raise ValueError(f"reward of token {token} (sequence {int(ids[index])}) is {float(counted_rewards[index])}")


def _first_not_finite(values: Tensor) -> int | None:
    bad = (~torch.isfinite(values)).nonzero()
    return int(bad[0]) if bad.numel() else None
