"""Which samples share an optimizer step: mini-batches of whole groups, or of single samples.

In: the groups of the samples, in the order of the batch. Out: sample numbers by mini-batch, the same on every rank.
Must never import torch or anything of ours.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def by_group(group_ids: Sequence[int], num_mini_batches: int) -> list[list[int]]:
    """Mini-batch k of M holds the groups from k*G//M up to (k+1)*G//M, in the order in which they first occur.

    All samples of a group are in one mini-batch, wherever they stand. With fewer groups than mini-batches some are
    empty.

    >>> by_group([7, 7, 3, 3, 9, 7], 2)
    [[0, 1, 5], [2, 3, 4]]
    """
    members: dict[int, list[int]] = {}
    for number, group in enumerate(group_ids):
        members.setdefault(group, []).append(number)
    return [
        sorted(number for group in part for number in group) for part in _cut(list(members.values()), num_mini_batches)
    ]


def by_sample(num_samples: int, num_mini_batches: int, *, seed: str) -> list[list[int]]:
    """Equal mini-batches (up to one sample) of samples in an order that `seed` alone decides.

    >>> sorted(by_sample(4, 2, seed="a")[0] + by_sample(4, 2, seed="a")[1])
    [0, 1, 2, 3]
    """
    order = list(range(num_samples))
    random.Random(seed).shuffle(order)
    return [sorted(part) for part in _cut(order, num_mini_batches)]


def _cut(items: list[T], num_parts: int) -> list[list[T]]:
    if num_parts < 1:
        raise ValueError(f"the number of mini-batches is {num_parts}, must be at least 1")
    bounds = [index * len(items) // num_parts for index in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
