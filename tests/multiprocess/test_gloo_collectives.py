"""Pieces of different sizes between gloo ranks, against what a slow loop over all ranks' inputs gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from rlmegatron.platform.gloo_collectives import all_gather, all_to_all_single, reduce_scatter

RANKS = 3
ROWS = [2, 0, 5]  # of each rank's piece
SENT = [[1, 4, 0], [2, 0, 3], [0, 0, 2]]  # rows from each rank to each rank


def tensor_of(rank: int, rows: int, columns: int = 4) -> Tensor:
    """The input that `rank` has, which every rank can make."""
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + 100 * (rank + 1)


def gathers() -> list[str]:
    """Names of the gathers that went wrong."""
    rank, wrong = dist.get_rank(), []
    for name, rows in {"uneven": ROWS, "even": [3, 3, 3], "nothing": [0, 0, 0], "one": [0, 1, 0]}.items():
        found = [torch.full((size, 4), torch.nan) for size in rows]
        all_gather(found, tensor_of(rank, rows[rank]))
        if not all(torch.equal(piece, tensor_of(other, rows[other])) for other, piece in enumerate(found)):
            wrong.append(f"all_gather {name}")
    return wrong


def scatters() -> list[str]:
    rank, wrong = dist.get_rank(), []
    for name, rows in {"uneven": ROWS, "even": [3, 3, 3], "one": [0, 1, 0]}.items():
        mine = [tensor_of(rank, size) * (target + 2) for target, size in enumerate(rows)]
        before = [piece.clone() for piece in mine]
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            found = torch.full((rows[rank], 4), torch.nan)
            reduce_scatter(found, mine, op=operation)
            of_ranks = [tensor_of(other, rows[rank]) * (rank + 2) for other in range(RANKS)]
            expected = sum(of_ranks) if operation == dist.ReduceOp.SUM else torch.stack(of_ranks).amax(0)
            if not torch.equal(found, expected):  # type: ignore[arg-type]
                wrong.append(f"reduce_scatter {name} {operation}")
        if not all(torch.equal(now, then) for now, then in zip(mine, before, strict=True)):
            wrong.append(f"reduce_scatter {name} changed its input")
    return wrong


def exchanges() -> list[str]:
    rank, wrong = dist.get_rank(), []
    given, taken = SENT[rank], [row[rank] for row in SENT]
    parts = [tensor_of(source, sum(SENT[source])).split(SENT[source])[rank] for source in range(RANKS)]
    kinds: dict[str, Any] = {"lists": list, "tensors": torch.tensor, "arrays": np.array}
    for name, kind in kinds.items():
        found = torch.full((sum(taken), 4), torch.nan)
        all_to_all_single(found, tensor_of(rank, sum(given)), kind(taken), kind(given))
        if not torch.equal(found, torch.cat(parts)):
            wrong.append(f"all_to_all_single {name}")
    found = torch.full((RANKS, 4), torch.nan)
    all_to_all_single(found, tensor_of(rank, RANKS))
    if not torch.equal(found, torch.stack([tensor_of(source, RANKS)[rank] for source in range(RANKS)])):
        wrong.append("all_to_all_single even")
    return wrong


def within_a_group() -> list[str]:
    """Ranks 0 and 2 alone; rank 1 takes no part."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return []
    rank, rows = dist.get_rank(group), [1, 3]
    pieces = [torch.full((size, 4), torch.nan) for size in rows]
    all_gather(pieces, tensor_of(rank, rows[rank]), group=group)
    found = torch.full((rows[rank], 4), torch.nan)
    reduce_scatter(found, [tensor_of(rank, size) for size in rows], group=group)
    is_gathered = all(torch.equal(piece, tensor_of(other, rows[other])) for other, piece in enumerate(pieces))
    is_reduced = torch.equal(found, tensor_of(0, rows[rank]) + tensor_of(1, rows[rank]))
    return [] if is_gathered and is_reduced else ["of a group"]


def in_the_backward_pass_of_megatron() -> list[str]:
    """Megatron's all-to-all with splits as its token dispatcher makes them: gradients go the way back."""
    from megatron.core.tensor_parallel import all_to_all

    import rlmegatron.learner.groups  # noqa: F401

    rank = dist.get_rank()
    given, taken = SENT[rank], [row[rank] for row in SENT]
    tokens = tensor_of(rank, sum(given)).requires_grad_()
    (all_to_all(dist.group.WORLD, tokens, taken, given) * (rank + 1)).sum().backward()
    factors = torch.cat([torch.full((rows, 4), target + 1.0) for target, rows in enumerate(given)])
    return [] if tokens.grad is not None and torch.equal(tokens.grad, factors) else ["gradient of all_to_all"]


def all_of_them() -> list[str]:
    return gathers() + scatters() + exchanges() + within_a_group() + in_the_backward_pass_of_megatron()


def test_pieces_of_any_size_arrive_where_they_belong() -> None:
    assert run_ranks(all_of_them, RANKS) == [[], [], []]
