"""Whether engines hold what the learner holds: one digest per Hugging Face tensor from either side, however it is cut.

In: a `TensorStream` of the policy and an engine after a transfer. Out: nothing, or an EngineError that names a tensor.
It reads every parameter where it lives and knows nothing of how it came there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from rlmegatron.distributed.world import World
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.load import slices
from rlmegatron.models.stream import TensorStream
from rlmegatron.rollout.api import EngineError, RolloutEngine
from rlmegatron.weight_sync.digest import digest, wrapped
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_orders import ask
from rlmegatron.weight_sync.engine_placement import Placement
from rlmegatron.weight_sync.engine_worker import DIGEST
from rlmegatron.weight_sync.engines import Engines


class Verifier:
    """Compares after each transfer; the pieces of a tensor are summed over the ranks of either side."""

    def __init__(self, world: World, stream: TensorStream, arch: Architecture, engines: Engines) -> None:
        self._world, self._stream, self._arch, self._engines = world, stream, arch, engines
        self._widths = {spec.name: spec.shape[-1] for spec in stream.tensors(engines.dtype)}

    def verify(self, engine: RolloutEngine | None) -> None:
        """Collective over the world; RankFailure on every rank where an engine differs."""
        mine = self._world.settle("publish (digest)", self._own_digests)
        dist.all_reduce(mine, group=self._stream.group)
        self._world.settle("publish (verify)", lambda: self._compare(engine, mine))

    def _own_digests(self) -> torch.Tensor:
        """[number of tensors] sums over what this rank is the first to hold."""
        numbers = {name: number for number, name in enumerate(self._widths)}
        found = [0] * len(numbers)
        stream = self._stream
        place = stream.layout.places()[stream.group.rank()]
        for rule in stream.rules:
            if rule.copy or not stream.sends(place, rule):
                continue
            tensor = stream.parameters[rule.parameter]
            size, rank = stream.layout.cut(rule, place)
            for piece in rule.pieces(size=size, rank=rank):
                part = tensor[slices(piece.target)]
                part = part if rule.keeps_fp32 else part.to(self._engines.dtype)
                number = numbers[piece.name]
                found[number] = wrapped(found[number] + digest(part, **self._place(piece.name, piece.source)))
        return torch.tensor(found, dtype=torch.int64, device=next(iter(stream.parameters.values())).device)

    def _place(self, name: str, source: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Where a box lies in its tensor, as `digest` takes it."""
        row = source[0][0] if len(source) > 1 else 0
        return {"row": row, "column": source[-1][0], "width": self._widths[name]}

    @cached_property
    def _boxes(self) -> list[list[Placement]]:
        """Of every engine rank; only a rank that leads an engine looks at them."""
        tp, ep, on_cpu = self._engines.tensor, self._engines.expert, self._world.device.type == "cpu"
        return [list(placements(self._arch, tp=tp, ep=ep, rank=rank, on_cpu=on_cpu)) for rank in range(tp)]

    def _compare(self, engine: RolloutEngine | None, expected: torch.Tensor) -> None:
        if engine is None:
            return
        answers = ask(engine, DIGEST, self._orders)
        wrong = list(self._differences(answers, dict(zip(self._widths, expected.tolist(), strict=True))))
        if wrong:
            raise EngineError(
                f"after the transfer {len(wrong)} of {len(self._widths)} tensors differ between learner and engine; "
                f"the first is {wrong[0]}"
            )

    @cached_property
    def _orders(self) -> list[dict[str, Any]]:
        """The same in every publish."""
        return [{"boxes": [self._order(box) for box in boxes]} for boxes in self._boxes]

    def _order(self, box: Placement) -> list[Any]:
        homes = [[home.parameter, home.box] for home in box.homes]
        return [homes, *self._place(box.name, box.source).values()]

    def _differences(self, answers: Sequence[Sequence[int | str]], expected: dict[str, int]) -> Iterator[str]:
        by_tensor: dict[tuple[str, bool], list[tuple[int, Placement, int | str]]] = defaultdict(list)
        for rank, (boxes, answer) in enumerate(zip(self._boxes, answers, strict=True)):
            for box, found in zip(boxes, answer, strict=True):
                by_tensor[box.name, box.is_derived].append((rank, box, found))
        for (name, _), parts in by_tensor.items():
            problem = _problem(parts, expected[name])
            if problem:
                yield f"{name} ({problem})"


def _problem(parts: Iterable[tuple[int, Placement, int | str]], expected: int) -> str | None:
    """A box that several ranks hold alike counts once, and must be equal on all."""
    digests: dict[Any, int] = {}
    homes: dict[str, list[int]] = defaultdict(list)
    for rank, box, found in parts:
        if isinstance(found, str):
            return f"on engine rank {rank}: {found}"
        homes[box.homes[0].parameter].append(rank)
        if digests.setdefault(box.source, found) != found:
            return f"engine ranks {sorted(set(homes[box.homes[0].parameter]))} hold it differently"
    if wrapped(sum(digests.values())) == expected:
        return None
    return "; ".join(f"in {parameter} of engine ranks {sorted(set(ranks))}" for parameter, ranks in homes.items())
