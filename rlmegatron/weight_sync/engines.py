"""The engines of a run, as all that moves or compares weights knows them.

In: where they lie and how they cut a model. Out: one record. Must never hold an engine itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlmegatron.rollout.placement import EnginePlacement


@dataclass(frozen=True, slots=True)
class Engines:
    """Where they lie and how a model is cut there, over `tensor` ranks and its experts in `expert` parts; `dtype` is
    that of their weights."""

    placements: Sequence[EnginePlacement]
    tensor: int
    expert: int
    dtype: torch.dtype
