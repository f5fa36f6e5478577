"""The forecast of a reshard: hand-worked bytes, groups over nodes, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plan_reshard
import pytest

HIDDEN, FFN, LAYERS, HEAD, VOCAB = 128, 512, 4, 32, 128


@pytest.fixture
def planned(make_model: Callable[..., Path], make_config: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """The numbers for some ranks and settings: a Qwen3 of which nothing but norms is held twice, in bf16."""
    make_model(vocab_size=VOCAB, tie_word_embeddings=False, num_key_value_heads=4)
    config, out = make_config({"model.dtype": "bf16"}), tmp_path / "plan.json"

    def plan(*arguments: str) -> Any:
        assert plan_reshard.main(["--config", str(config), "--json", str(out), *arguments]) == 0
        return json.loads(out.read_text())

    return plan


def test_bytes_are_those_worked_out_by_hand(planned: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """TP 4 -> TP 2: a rank gets the quarter of each matrix that it does not hold of its half; all hold the norms."""
    found = planned("--ranks", "4", "parallel.tensor=4", "rollout.tensor=2")
    matrices = 2 * VOCAB * HIDDEN + LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    norms = LAYERS * (2 * HIDDEN + 2 * HEAD) + HIDDEN
    assert found["model_bytes"] == 2 * (matrices + norms)
    assert set(found["received"]) == {2 * matrices // 4}
    assert found["bound"] == found["model_bytes"] // 2 - found["model_bytes"] // 4
    assert found["engines"] == [[0, 2], [1, 3]] and found["groups"] == [[0, 1], [2, 3]]
    assert found["total"] == sum(found["received"]) == sum(found["sent"])
    assert "1.00 x the bound" in capsys.readouterr().out


def test_groups_that_span_nodes_are_counted(planned: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("--ranks", "8", "--ranks-per-node", "4", "parallel.pipeline=2", "parallel.tensor=2")
    assert found["groups"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert found["groups_across_nodes"] == 2
    assert "two buckets of 512 MiB" in capsys.readouterr().out


def test_an_engine_over_two_learners_moves_nothing(planned: Callable[..., Any]) -> None:
    """Each of its ranks holds half of what its own training rank holds."""
    found = planned("--ranks", "4", "parallel.tensor=2", "rollout.tensor=4")
    assert found["engines"] == [[0, 2, 1, 3]] and found["total"] == 0


def test_a_mistake_in_the_config_plans_nothing(
    make_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_reshard.main(["--config", str(make_config()), "--ranks", "3", "parallel.tensor=2"]) == 2
    assert "nothing was planned" in (said := capsys.readouterr().err) and "multiple of 2" in said


@pytest.mark.parametrize(
    ("settings", "name", "says"),
    [
        ([], "peer", "nothing beside the weights"),
        (["weight_sync.transport=collective"], "collective", "two buckets of 512 MiB"),
        (["rollout.dtype=fp32"], "hf_stream", "whole tensors"),
    ],
)
def test_the_transport_and_its_memory_are_named(
    planned: Callable[..., Any], capsys: pytest.CaptureFixture[str], settings: list[str], name: str, says: str
) -> None:
    assert planned("--ranks", "2", "parallel.tensor=2", *settings)["transport"] == name
    assert says in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_named(
    make_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(make_config()), "--ranks", "2", "--json", str(tmp_path)]
    assert plan_reshard.main(arguments) == 2
    assert f"--json {tmp_path}: cannot be written (Is a directory)" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    code = "import sys, plan_reshard; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(plan_reshard.__file__).parent, check=False)
    assert done.returncode == 0
