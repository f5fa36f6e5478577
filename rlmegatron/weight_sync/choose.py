"""Which transport a run uses, and why.

In: the weight_sync section, the types of weights on both sides and the nodes. Out: the transport's name and the reason,
for one line in the log.
"""

from __future__ import annotations

from rlmegatron.config.schema import WeightSyncConfig


def choose_transport(
    config: WeightSyncConfig, *, train_dtype: str, engine_dtype: str, num_nodes: int
) -> tuple[str, str]:
    """(name, reason); ValueError for a configured transport that cannot work here."""
    widens = train_dtype != engine_dtype and train_dtype != "fp32"
    if config.transport in ("peer", "collective") and widens:
        raise ValueError(
            f"weight_sync.transport: {config.transport!r} keeps weights as they are or rounds fp32 to bf16, but the "
            f"learner has {train_dtype} (model.dtype) and engines want {engine_dtype} (rollout.dtype); use 'hf_stream'"
        )
    if config.transport != "auto":
        return config.transport, "configured"
    if widens:
        return "hf_stream", f"engines want {engine_dtype} weights of a {train_dtype} learner, which is the slow way"
    if num_nodes == 1:
        return "peer", "all ranks are on one node and read each other's memory"
    return "peer", f"ranks of a node read each other's memory; groups that span the {num_nodes} nodes exchange buckets"
