"""What runs inside an engine's worker processes: it reads back the live parameters and digests them.

In: SGLang's model and two shared tensors. Out: the digests, written into the second tensor. Named to SGLang as a custom
weight loader, which is how a call reaches every worker; it changes no weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from rlmegatron.weight_sync.digest import digest

REPORT = "rlmegatron.weight_sync.engine_worker.report_digests"


def report_digests(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """`entries` (JSON bytes: [parameter, target box] each) -> digests[i] of the live box i, in shared memory."""
    payload = dict(named_tensors)
    live = dict(model.named_parameters())
    for number, (parameter, box) in enumerate(json.loads(payload["entries"].numpy().tobytes())):
        index = tuple(slice(start, stop) for start, stop in box)
        payload["digests"][number] = digest(live[parameter][index])
