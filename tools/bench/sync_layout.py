"""How the benchmark of the weight sync is told layouts: `tp8pp1->tp2`, and what each rank is in one.

In: a text and the number of ranks. Out: sizes, replicas and engines. Pure; must never import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlmegatron.config.partition import engine_groups
from rlmegatron.models.replica import Place, ReplicaLayout

TRAIN_SIZES = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual pipeline", "ep": "expert", "etp": "expert tensor"}
ENGINE_SIZES = {"tp": "tensor", "ep": "expert"}
_SIZE = re.compile(r"([a-z]+)(\d+)")


@dataclass(frozen=True, slots=True)
class SyncLayout:
    """Learner and engines over the same `num_ranks`, in Megatron's order of ranks and in ours of engines."""

    text: str
    train: ReplicaLayout
    vpp: int
    engine_tensor: int
    engine_expert: int
    num_ranks: int

    @property
    def replicas(self) -> list[tuple[int, ...]]:
        """The ranks that hold a whole model, one tuple for each copy of it."""
        return self.train.replicas(self.num_ranks)

    @property
    def engines(self) -> list[tuple[int, ...]]:
        """The ranks that each engine shares its devices with, in the order of the engine's own."""
        return engine_groups(world_size=self.num_ranks, tensor=self.engine_tensor, train_tensor=self.train.tp)

    def place(self, rank: int) -> Place:
        """What a rank is to its replica."""
        replica = next(ranks for ranks in self.replicas if rank in ranks)
        return self.train.places()[replica.index(rank)]

    def engine_rank(self, rank: int) -> tuple[int, int]:
        """(number of the engine, rank in it) that shares its device with a rank."""
        number = next(number for number, ranks in enumerate(self.engines) if rank in ranks)
        return number, self.engines[number].index(rank)


def parse_layout(text: str, *, num_ranks: int | None) -> SyncLayout:
    """ValueError says what is wrong; without `num_ranks` it is the fewest that hold a whole model and whole engines."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"--layout {text}: write LEARNER->ENGINE, such as tp8pp1->tp2")
    train = _sizes(text, sides[0], "learner", TRAIN_SIZES)
    engine = _sizes(text, sides[1], "engine", ENGINE_SIZES)
    replica = ReplicaLayout(train["tp"], train["pp"], ep=train["ep"], etp=train["etp"])
    if train["vpp"] > 1 and train["pp"] == 1:
        raise ValueError(f"--layout {text}: vpp{train['vpp']} needs pp above 1")
    if engine["tp"] % engine["ep"]:
        raise ValueError(f"--layout {text}: an engine cuts experts over its own ranks: ep must divide tp there")
    fewest = replica.per_stage * replica.pp
    if num_ranks is None:
        num_ranks = fewest * (engine["tp"] // fewest) if engine["tp"] > fewest else fewest
    if num_ranks % fewest:
        raise ValueError(f"--layout {text}: {num_ranks} ranks cannot hold it; use a multiple of {fewest}")
    if num_ranks % engine["tp"]:
        raise ValueError(f"--layout {text}: {num_ranks} ranks cannot be shared out to engines of {engine['tp']}")
    return SyncLayout(text, replica, train["vpp"], engine["tp"], engine["ep"], num_ranks)


def _sizes(text: str, side: str, whose: str, known: dict[str, str]) -> dict[str, int]:
    found = _SIZE.findall(side)
    names = ", ".join(f"{name} ({meaning})" for name, meaning in known.items())
    if "".join(name + size for name, size in found) != side or not found:
        raise ValueError(f"--layout {text}: {side!r} is no list of sizes such as tp8pp1; the {whose} has {names}")
    for name, size in found:
        if name not in known:
            raise ValueError(f"--layout {text}: the {whose} has no {name}; it has {names}")
        if int(size) < 1:
            raise ValueError(f"--layout {text}: {name}{size} must be at least 1")
    if len({name for name, _ in found}) < len(found):
        raise ValueError(f"--layout {text}: {side!r} names a size twice")
    return {**dict.fromkeys(known, 1), **{name: int(size) for name, size in found}}
