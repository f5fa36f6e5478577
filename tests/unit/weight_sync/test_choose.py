"""Which transport is taken, and why."""

from __future__ import annotations

import pytest

from rlmegatron.config.schema import WeightSyncConfig
from rlmegatron.weight_sync.choose import choose_transport


@pytest.mark.parametrize(
    ("train_dtype", "engine_dtype", "num_nodes", "name", "reason"),
    [
        ("bf16", "bf16", 1, "peer", "all ranks are on one node"),
        ("fp32", "bf16", 1, "peer", "all ranks are on one node"),
        ("bf16", "bf16", 4, "peer", "span the 4 nodes"),
        ("bf16", "fp32", 1, "hf_stream", "fp32 weights of a bf16 learner"),
    ],
)
def test_auto_takes_the_fastest_that_works(
    train_dtype: str, engine_dtype: str, num_nodes: int, name: str, reason: str
) -> None:
    found = choose_transport(
        WeightSyncConfig(), train_dtype=train_dtype, engine_dtype=engine_dtype, num_nodes=num_nodes
    )
    assert found[0] == name and reason in found[1]


@pytest.mark.parametrize("name", ["peer", "collective", "hf_stream"])
def test_what_is_configured_is_taken(name: str) -> None:
    config = WeightSyncConfig(transport=name)  # type: ignore[arg-type]
    assert choose_transport(config, train_dtype="bf16", engine_dtype="bf16", num_nodes=2) == (name, "configured")


@pytest.mark.parametrize("name", ["peer", "collective"])
def test_what_cannot_work_was_refused_by_the_check_of_the_config(name: str) -> None:
    config = WeightSyncConfig(transport=name)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=f"rules.py lets '{name}' widen weights"):
        choose_transport(config, train_dtype="bf16", engine_dtype="fp32", num_nodes=1)
