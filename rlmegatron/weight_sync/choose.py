"""Which transport a run uses, and why.

In: the weight_sync section, the types of weights on both sides and the nodes. Out: the transport's name and the reason,
for one line in the log.
"""

from __future__ import annotations

from typing import Literal

from rlmegatron.config.schema import WeightSyncConfig

TransportName = Literal["peer", "collective", "hf_stream"]


def choose_transport(
    config: WeightSyncConfig, *, train_dtype: str, engine_dtype: str, num_nodes: int
) -> tuple[TransportName, str]:
    """(name, reason), for a configuration that passed its check."""
    widens = train_dtype != engine_dtype and train_dtype != "fp32"
    if config.transport != "auto":
        assert config.transport == "hf_stream" or not widens, f"config/rules.py lets {config.transport!r} widen weights"
        return config.transport, "configured"
    if widens:
        return "hf_stream", f"engines want {engine_dtype} weights of a {train_dtype} learner, which is the slow way"
    if num_nodes == 1:
        return "peer", "all ranks are on one node and read each other's memory"
    return "peer", f"ranks of a node read each other's memory; groups that span the {num_nodes} nodes exchange buckets"
