"""The reshard: weights go from the training ranks' parameters to where they belong in the engines' live ones, once.

In: a `TensorStream` of the policy and where the engines lie. Out: engines whose every parameter was written by a copy
of ours; no full tensor is ever built. Ranks of a node read each other's memory ('peer'), others, or with 'collective'
all, exchange buckets. The order of operations around a transfer is `publish.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlmegatron.distributed.world import World
from rlmegatron.models.architecture import Architecture
from rlmegatron.models.stream import TensorStream
from rlmegatron.rollout.api import RolloutEngine
from rlmegatron.rollout.placement import engine_of
from rlmegatron.weight_sync.agree import Agreement, Known, Side, Terms, agree
from rlmegatron.weight_sync.bind import SLOT_DTYPES
from rlmegatron.weight_sync.buckets import BucketGroup
from rlmegatron.weight_sync.engine_layout import placements
from rlmegatron.weight_sync.engine_orders import ask
from rlmegatron.weight_sync.engine_parameters import EngineParameters
from rlmegatron.weight_sync.engine_worker import CONNECT, DESCRIBE, PULL
from rlmegatron.weight_sync.engines import Engines
from rlmegatron.weight_sync.plan import plan_pieces
from rlmegatron.weight_sync.plan_cache import Plan, find_plan
from rlmegatron.weight_sync.shared_memory import Handle
from rlmegatron.weight_sync.shared_parameters import SharedParameters
from rlmegatron.weight_sync.sources import TrainRanks
from rlmegatron.weight_sync.traffic import least_bytes, model_bytes

Name = Literal["peer", "collective"]


@dataclass(frozen=True, slots=True)
class ReshardSettings:
    """`timeout_s` is that of a transfer in seconds, `cache` a directory of plans."""

    bytes_per_bucket: int
    timeout_s: float
    cache: Path | None = None


@dataclass(frozen=True, slots=True)
class _Planned:
    """Parameters of the engine's rank as its table counts them, those with padding, and what comes from where."""

    names: tuple[str, ...]
    padded: list[int]
    side: Side


class Reshard:
    """Both transports without full tensors; they differ in who reads whose memory. `say` prints a line on rank 0."""

    def __init__(
        self,
        name: Name,
        stream: TensorStream,
        arch: Architecture,
        engines: Engines,
        world: World,
        settings: ReshardSettings,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self._stream, self._arch, self._engines = stream, arch, engines
        self._world, self._settings, self._say = world, settings, say
        self._placement = engine_of(world.rank, engines.placements)
        self._rank = self._placement.ranks.index(world.rank)
        self._ranks = TrainRanks(stream.layout, world.size, world.ranks_per_node, stream.num_experts)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._shared = self._share()
        self._agreement: Agreement | None = None
        self._orders: list[Any] | None = None
        self._worker_pid = -1
        self._connected_to: object = None
        self._is_connected = False

    def transfer(self, engine: RolloutEngine | None) -> None:
        """See `Transport`; collective over the world, and the first call plans."""
        if any(self._world.gather(self._must_connect(engine))):
            self._connect(engine)
        assert self._agreement is not None
        orders = self._to_lead(self._order(self._agreement)) if self._orders is None else self._orders
        self._is_connected = False
        with ThreadPoolExecutor(1, thread_name_prefix="reshard") as executor:
            pulled = executor.submit(ask, engine, PULL, orders) if engine is not None else None
            self._take_part(pulled)
            if pulled is not None:
                pulled.result()
        self._is_connected = True

    @property
    def bytes_received(self) -> int:
        """What the last transfer brought to this rank's device from those of others."""
        assert self._agreement is not None, "nothing was transferred"
        return self._agreement.bytes_received

    @property
    def bucket_bytes(self) -> int:
        """Memory that the last transfer took beside parameters and tables."""
        assert self._agreement is not None, "nothing was transferred"
        return self._agreement.group.num_bytes if self._agreement.group else 0

    @property
    def num_messages(self) -> int:
        """Of the last transfer: storages of others that this rank's worker reads, and buckets."""
        assert self._agreement is not None, "nothing was transferred"
        others = sum(rank != self._world.rank for rank, _ in self._agreement.direct.storages)
        return others + len(self._agreement.tables)

    def _must_connect(self, engine: RolloutEngine | None) -> bool:
        """Also after a failure here, of which something may have been left."""
        is_new = engine is not None and engine.incarnation != self._connected_to
        return is_new or not self._is_connected or self._shared.have_moved()

    def _connect(self, engine: RolloutEngine | None) -> None:
        """Everything that is done once: an engine's workers describe themselves, ranks plan and agree, workers
        learn."""
        world, settings = self._world, self._settings
        self._agreement, self._orders, self._is_connected = None, None, False
        described = self._to_mates(world.settle("reshard (describe)", lambda: self._describe(engine)))
        self._worker_pid = described["pid"]
        planned: list[_Planned] = []

        def plan() -> Known:
            planned.append(self._plan(described["parameters"]))
            return Known.of(planned[0].side)

        known = world.collect("reshard (plan)", plan)
        names, padded, side = planned[0].names, planned[0].padded, planned[0].side
        terms = Terms(self.name == "peer", settings.bytes_per_bucket, settings.timeout_s, self._group_of)
        agreement = agree(world, self._ranks, side, known, terms)
        order = {"names": names, "padded": padded, "timeout_s": settings.timeout_s}
        lasts = self._shared.device.type == "cpu"
        orders = self._to_lead((order, _tensors(agreement), self._order(agreement) if lasts else None))

        def tell() -> int:
            if engine is not None:
                _tell(engine, orders)
            return agreement.bytes_received

        received = world.collect("reshard (connect)", tell)
        self._agreement = agreement
        self._report(received)
        self._orders = [pull for *_, pull in orders] if lasts else None
        self._connected_to = engine.incarnation if engine is not None else None
        self._is_connected = True

    def _report(self, received: Sequence[int]) -> None:
        """What a transfer moves, beside the bound; one line."""
        assert self._agreement is not None
        buckets = len(self._agreement.tables)
        whole = model_bytes(self._stream.rules, itemsize=self._engines.dtype.itemsize)
        bound = least_bytes(whole, self._stream.layout, engine_tensor=self._engines.tensor)
        mib = 1 << 20
        if not any(received):
            self._say("weight sync: a publish moves nothing between ranks, which hold what their engine ranks serve")
            return
        self._say(
            f"weight sync: a publish brings {max(received) / mib:,.1f} MiB to a rank, {sum(received) / mib:,.1f} MiB "
            f"in all, in {buckets} buckets; the bound for even shards is {bound / mib:,.1f} MiB a rank"
        )

    def _describe(self, engine: RolloutEngine | None) -> list[Any]:
        return ask(engine, DESCRIBE, [{}] * len(self._placement.ranks)) if engine is not None else []

    def _share(self) -> SharedParameters:
        return SharedParameters(self._stream.rules, self._stream.parameters)

    def _plan(self, description: dict[str, Any]) -> _Planned:
        if self._shared.have_moved():
            self._shared = self._share()
        parameters = EngineParameters.of(description)
        named = zip(parameters.names, parameters.dtypes, strict=True)
        itemsizes = np.array([_itemsize(name, dtype) for name, dtype in named], dtype=np.int64)
        stream, tp, ep = self._stream, self._engines.tensor, self._engines.expert
        on_cpu = self._world.device.type == "cpu"
        stages = {rule.layer: stream.stage_of(rule) for rule in stream.rules if rule.layer is not None}

        def compute() -> Plan:
            mine, first = (placements(self._arch, tp=tp, ep=ep, rank=rank, on_cpu=on_cpu) for rank in (self._rank, 0))
            wanted = parameters.wanted(mine, of_first=lambda: first)
            pieces = plan_pieces(stream.rules, wanted, stream.layout, stage_of=stream.stage_of)
            return Plan(pieces, np.array(parameters.padded(wanted), dtype=np.int64))

        facts = (_facts_of(self._arch), stream.layout, stages, (tp, ep, self._rank, on_cpu), parameters)
        plan = find_plan(self._settings.cache, facts, compute)
        source_ranks = self._ranks.source_ranks(plan.pieces, on=self._world.rank)
        side = Side(plan.pieces, source_ranks, itemsizes, self._shared)
        return _Planned(parameters.names, plan.padded.tolist(), side)

    def _order(self, agreement: Agreement) -> dict[str, Any]:
        """What this rank's worker is told in a transfer. Collective on a GPU, whose memory has other handles each time:
        each rank asks those whose storages it reads."""
        group = agreement.group
        if agreement.sources is not None:
            sources, slots = agreement.sources, _slots(group)
        else:
            sources, slots = self._exchange_handles(agreement.direct.storages, group)
        order: dict[str, Any] = {"sources": [handle.as_json() for handle in sources]}
        if group is not None:
            order["slots"] = [[handle.as_json() for handle in slot] for slot in slots]
            order["line"] = [group.port.address, group.port.token.hex()]
        return order

    def _exchange_handles(
        self, storages: Sequence[tuple[int, int]], group: BucketGroup | None
    ) -> tuple[list[Handle], list[list[Handle]]]:
        """Those of `storages`, and of this rank's buckets."""
        wanted: list[list[int]] = [[] for _ in range(self._world.size)]
        for rank, number in storages:
            wanted[rank].append(number)
        asked = self._world.exchange(wanted)
        given, slots = self._world.settle(
            "reshard (handles)", lambda: ([self._shared.handles(numbers) for numbers in asked], _slots(group))
        )
        incoming = [iter(handles) for handles in self._world.exchange(given)]
        return [next(incoming[rank]) for rank, _ in storages], slots

    def _take_part(self, pulled: Future[Any] | None) -> None:
        """In the buckets, where there are any; a failure comes after the lead's call has ended, which says more."""
        assert self._agreement is not None
        if self._agreement.group is None:
            return
        try:
            self._agreement.group.exchange(is_alive=lambda: self._worker_lives(pulled))
        except Exception:
            if pulled is not None:
                pulled.result()
            raise

    def _worker_lives(self, pulled: Future[Any] | None) -> bool:
        return not (pulled is not None and pulled.done()) and _lives(self._worker_pid)

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        key = tuple(ranks)
        if key not in self._groups:
            group = dist.new_group(list(ranks))
            self._groups[key] = group
        return self._groups[key]

    def _to_mates(self, values: Sequence[Any]) -> Any:
        """The lead's value for each rank of its engine -> this rank's."""
        outgoing: list[Any] = [None] * self._world.size
        for rank, value in zip(self._placement.ranks, values, strict=False):
            outgoing[rank] = value
        return self._world.exchange(outgoing)[self._placement.lead]

    def _to_lead(self, value: Any) -> list[Any]:
        """This rank's value -> those of all ranks of the engine, on its lead; others get none."""
        outgoing: list[Any] = [None] * self._world.size
        outgoing[self._placement.lead] = value
        incoming = self._world.exchange(outgoing)
        return [incoming[rank] for rank in self._placement.ranks] if self._rank == 0 else []


def _slots(group: BucketGroup | None) -> list[list[Handle]]:
    return group.handles() if group is not None else []


def _facts_of(arch: Architecture) -> list[tuple[str, object]]:
    """All but the function that makes its rules."""
    return [(field.name, getattr(arch, field.name)) for field in fields(arch) if field.name != "rules"]


def _itemsize(name: str, dtype: str) -> int:
    for size, known in SLOT_DTYPES.items():
        if dtype == known:
            return size
    raise ValueError(f"the engine's {name} is {dtype}; without full tensors only fp32 and bf16 can be moved")


def _lives(pid: int) -> bool:
    """A process that has ended, though its parent has not noticed, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def _tell(engine: RolloutEngine, orders: Sequence[Any]) -> None:
    """`orders` are (order, tables, ...) of every rank of the engine."""
    tables = [of_rank for _, of_rank, _ in orders]
    tensors = {name: [of_rank[name] for of_rank in tables] for name in tables[0]}
    ask(engine, CONNECT, [order for order, *_ in orders], tensors)


def _tensors(agreement: Agreement) -> dict[str, Tensor]:
    """The tables as `engine_pull.Connection` takes them."""
    bounds = np.cumsum([0, *(len(table) for table in agreement.tables)])
    tables = np.concatenate([*agreement.tables, np.empty((0, 8), dtype=np.int64)])
    return {
        "direct": torch.from_numpy(agreement.direct.table),
        "buckets": torch.from_numpy(tables),
        "bounds": torch.from_numpy(bounds.astype(np.int64)),
    }
