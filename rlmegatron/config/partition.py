"""How a model is cut (layers into pipeline stages, a stage over ranks, a vocabulary over those) and ranks into engines.

In: numbers. Out: numbers. Pure, so that the check of a config and a run use the same; must never import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

_VOCAB_MULTIPLE = 8


def ranks_per_stage(*, tensor: int, expert: int, expert_tensor: int) -> int:
    """The fewest ranks of a stage over which both what is dense and the experts come out even."""
    return lcm(tensor, expert * expert_tensor)


def padded_vocab(vocab_size: int, *, tensor: int) -> int:
    """The vocabulary as the learner holds it: every rank has a multiple of 8 rows (tensor-core shapes)."""
    multiple = _VOCAB_MULTIPLE * tensor
    return -(-vocab_size // multiple) * multiple


def engine_groups(
    *, world_size: int, tensor: int, train_tensor: int, ranks_per_node: int | None = None
) -> list[tuple[int, ...]]:
    """The ranks of every engine of `tensor` ranks, each in the order of the engine's own, by their first rank.

    Where one of the two tensor-parallel sizes divides the other, the smaller of a rank's two shares of the model, as a
    learner and as an engine, lies inside the larger (HybridFlow, arXiv 2409.19256, section 5): with a training TP of 8
    and engines of 2 they are (0, 4), (1, 5), (2, 6), (3, 7), with 2 and 4 they are (0, 2, 1, 3). Otherwise no order
    does that, and an engine's ranks are consecutive; so they are where tensor parallelism in training reaches over
    nodes, which engines must not. ranks_per_node: None where all ranks are on one. Raises ValueError for engines that
    span nodes even so.
    """
    assert world_size % tensor == world_size % train_tensor == 0, f"{tensor} and {train_tensor} in {world_size} ranks"
    per_node = min(ranks_per_node or world_size, world_size)
    for near in (train_tensor, 1):
        groups = _groups_near(near, world_size=world_size, tensor=tensor)
        if not _span_nodes(groups, per_node):
            return groups
    allowed = ", ".join(str(size) for size in range(1, per_node + 1) if per_node % size == 0)
    raise ValueError(
        f"rollout.tensor: engines of {tensor} ranks would span nodes of {per_node} ranks; use one of {allowed}"
    )


def _groups_near(train_tensor: int, *, world_size: int, tensor: int) -> list[tuple[int, ...]]:
    if train_tensor % tensor == 0:
        stride = train_tensor // tensor
        firsts = (block + number for block in range(0, world_size, train_tensor) for number in range(stride))
        return [tuple(range(first, first + train_tensor, stride)) for first in firsts]
    # Of one training shard, so many engine ranks hold a part each; they sit where that shard is trained.
    parts = tensor // train_tensor if tensor % train_tensor == 0 else 1
    order = [part % parts * train_tensor + part // parts for part in range(tensor)]
    return [tuple(first + place for place in order) for first in range(0, world_size, tensor)]


def _span_nodes(groups: Sequence[Sequence[int]], per_node: int) -> bool:
    return any(len({rank // per_node for rank in ranks}) > 1 for ranks in groups)


def stage_sizes(*, num_layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int]:
    """Layers of one chunk of every pipeline rank; ValueError where they do not come out even.

    `first` and `last` are the layers of the first and the last stage where those differ from the others; as in
    Megatron, what remains is cut evenly over the stages between, each of which holds at least one layer.
    """
    if first is None and last is None:
        if num_layers % (pp * vpp):
            raise ValueError(f"{num_layers} layers cannot be cut into {pp} x {vpp} equal chunks")
        return [num_layers // (pp * vpp)] * pp
    if vpp > 1:
        raise ValueError("stages of different sizes cannot be interleaved")
    ends = [size for size in (first, last) if size is not None]
    between, rest = pp - len(ends), num_layers - sum(ends)
    if between < 0 or rest < between or (rest % between if between else rest):
        shown = " and ".join(str(size) for size in ends)
        raise ValueError(f"{num_layers} layers less {shown} cannot be cut into {between} equal stages")
    middle = [rest // between] * between if between else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
