"""The learner computes what Hugging Face and plain torch compute, at every layout and for every packing.

What this does not prove: anything about CUDA kernels or Transformer Engine, models of real size, or more than 4 ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from sharded import Layout, distances

TOLERANCE = {"scores": 1e-4, "weights": 1e-5, "norm": 1e-5}
TP2 = Layout(2, {"tensor": 2})
PP2 = Layout(2, {"pipeline": 2})
DP2 = Layout(2, {})
TP2_PP2 = Layout(4, {"tensor": 2, "pipeline": 2, "sequence": True})
MORE = [
    Layout(1, {}),
    Layout(2, {"tensor": 2, "sequence": True}),
    Layout(2, {"pipeline": 2, "virtual_pipeline": 2}),
    Layout(2, {"distributed_optimizer": False}),
    TP2_PP2,
    Layout(4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    Layout(4, {"pipeline": 2}),
    Layout(1, {}, "full"),
    Layout(2, {"tensor": 2, "sequence": True}, "full"),
    Layout(2, {"pipeline": 2, "virtual_pipeline": 2}, "full"),
    Layout(2, {"tensor": 2}, "selective"),
]


def assert_like_hugging_face(models: Path, references: dict[str, Any], family: str, layout: Layout) -> None:
    """Also: `distances` itself must have seen every tensor of the checkpoint, on some rank."""
    reference = references[family]
    found = run_ranks(distances, layout.num_ranks, str(models / family), layout, reference)
    too_far = {
        f"rank {rank} {name}": value
        for rank, of_rank in enumerate(found)
        for name, value in of_rank.items()
        if not value < TOLERANCE[name.split("/")[0]]
    }
    assert not too_far, f"{family} at {layout}: {too_far}"
    names = {name for of_rank in found for name in of_rank}
    tied = "lm_head.weight" if family == "Qwen3" else None
    expected = {f"weights/actor {name} whole" for name in reference.actor_weights if name != tied}
    expected |= {f"weights/critic {name} whole" for name in reference.critic_weights if name != "value_head.weight"}
    assert expected <= names, f"never compared: {sorted(expected - names)}"


@pytest.mark.parametrize("layout", [TP2, PP2, DP2], ids=str)
def test_scores_and_first_step_equal_hugging_face(models: Path, references: dict[str, Any], layout: Layout) -> None:
    assert_like_hugging_face(models, references, "Qwen3", layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE, ids=str)
def test_further_layouts_equal_hugging_face(models: Path, references: dict[str, Any], layout: Layout) -> None:
    assert_like_hugging_face(models, references, "Qwen3", layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
@pytest.mark.parametrize("layout", [TP2, PP2, DP2, TP2_PP2], ids=str)
def test_other_families_equal_hugging_face(
    models: Path, references: dict[str, Any], family: str, layout: Layout
) -> None:
    assert_like_hugging_face(models, references, family, layout)
