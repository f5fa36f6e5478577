"""Which transport a run uses, and why.

In: the weight_sync section. Out: the transport's name and the reason, for one line in the log.
"""

from __future__ import annotations

from rlmegatron.config.schema import WeightSyncConfig


def choose_transport(config: WeightSyncConfig) -> tuple[str, str]:
    """(name, reason)."""
    if config.transport == "auto":
        return "hf_stream", "it works for every layout, and no faster transport is built in"
    return config.transport, "configured"
