"""Owns what one rank notes during one step, and how the notes of all ranks become one flat row of numbers.

In: metrics by name and the time of phases; out: a payload that pickles, and a pure merge of the payloads of all ranks.
Must never import torch or torch.distributed: the trainer carries the payloads between ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlmegatron.metrics.values import Max, Metric


@dataclass(frozen=True, slots=True)
class Payload:
    """The notes of one rank: what travels to rank 0."""

    step: int
    metrics: Mapping[str, Metric]


@dataclass(slots=True)
class StepLog:
    """The notebook of one rank for one step."""

    step: int
    clock: Callable[[], float] = time.perf_counter
    _metrics: dict[str, Metric] = field(default_factory=dict, init=False)
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _running: list[str] = field(default_factory=list, init=False)

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Time a phase as `time/<phase>` in seconds; inside another it is `time/<outer>/<phase>`, again and again adds.

        The time counts also when the phase raises. Over ranks the slowest counts, since the others wait for it.
        """
        self._running.append(phase)
        name = "/".join(self._running)
        start = self.clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self.clock() - start
            self._running.pop()

    def put(self, name: str, metric: Metric) -> None:
        """Note one metric; noting a name again merges. Raises ValueError for a bare number or a change of kind."""
        if not isinstance(metric, Metric):
            raise ValueError(f"metric {name!r}: {metric!r} does not say how it is reduced; wrap it, as in Mean.of([x])")
        self._metrics[name] = _merged(name, self._metrics[name], metric) if name in self._metrics else metric

    def add(self, metrics: Mapping[str, Metric], *, prefix: str = "") -> None:
        """Note several metrics, each as `prefix` + its name."""
        for name, metric in metrics.items():
            self.put(prefix + name, metric)

    def payload(self) -> Payload:
        """Everything noted so far, for `merge`."""
        timers = {f"time/{phase}": Max(seconds) for phase, seconds in self._seconds.items()}
        twice = timers.keys() & self._metrics.keys()
        assert not twice, f"metrics that are also timers: {', '.join(sorted(twice))}"
        return Payload(self.step, {**self._metrics, **timers})

    @staticmethod
    def merge(payloads: Sequence[Payload]) -> dict[str, float]:
        """The final numbers of a step by name, from the payloads of all ranks in rank order.

        A name that only some ranks noted is reduced over those. Raises ValueError when ranks noted different kinds
        under one name, or two metrics give the same final name.
        """
        steps = {payload.step for payload in payloads}
        assert len(steps) == 1, f"payloads of different steps: {sorted(steps)}"
        merged: dict[str, Metric] = {}
        for payload in payloads:
            for name, metric in payload.metrics.items():
                merged[name] = _merged(name, merged[name], metric) if name in merged else metric
        return _flat(merged)


def _merged(name: str, earlier: Metric, later: Metric) -> Metric:
    if type(earlier) is not type(later):
        kinds = f"{type(earlier).__name__} and {type(later).__name__}"
        raise ValueError(f"metric {name!r} was noted as two kinds: {kinds}")
    return earlier.merge(later)


def _flat(metrics: Mapping[str, Metric]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        for final_name, number in metric.values(name).items():
            if final_name in flat:
                raise ValueError(f"two metrics give {final_name!r}; one of them is {name!r} ({type(metric).__name__})")
            flat[final_name] = number
    return flat
