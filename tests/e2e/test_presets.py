"""Every preset of the quickstart for two steps of few answers on one rank: it must train, and show its own metrics.

They share one process and one engine (preset_runs.py), for to start these takes longer than the rest. It makes
runs/quickstart where that is missing, from which test_quickstart.py starts too. Says nothing about learning.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, metrics_of
from metric_names import undocumented

HERE = Path(__file__).parent
START = ROOT / "runs" / "quickstart"
PRESETS = sorted(path.stem.removeprefix("quickstart_") for path in (ROOT / "yaml_configs").glob("quickstart_*.yaml"))
OVERRIDES = (
    f"model.path={START}/model",
    f"data.train=[{{path: {START}/train.jsonl}}]",
    "rollout.prompts_per_step=32",
    "rollout.max_total_tokens=8192",
    "train.steps=2",
    "eval={}",
    "checkpoint.export=false",
    "logging={tensorboard: false, rollout_samples: 0}",
)
UNMOVED = "nothing_to_learn"
TIMEOUT_S = 560

ACTOR = {"actor/loss", "actor/grad_norm", "actor/entropy", "actor/ratio_max"}
CLIPPED = {*ACTOR, "actor/clip_fraction"}
DIVERGENCE = {*ACTOR, "actor/kl_ref"}
CRITIC = {"critic/loss", "critic/value_mean", "critic/grad_norm"}
SHOWN = {
    "cispo": CLIPPED,
    "dapo": {*CLIPPED, "dynamic_sampling/prompts_tried", "reward_parts/exact_answer", "reward_parts/overlong"},
    "dr_grpo": CLIPPED,
    "grpo": CLIPPED,
    "gspo": CLIPPED,
    "opo": CLIPPED,
    "ppo": {*CLIPPED, *CRITIC},
    "ppo_mixed": CRITIC,  # which learns alone in these steps
    "reinforce_pp": {*CLIPPED, *DIVERGENCE},
    "remax": DIVERGENCE,
    "rloo": DIVERGENCE,
}
"""Preset -> metrics of both steps, beside those of all presets."""


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directories of the presets that are tested."""
    made = tmp_path_factory.mktemp("presets")
    of_presets = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = [*(item.callspec.params["preset"] for item in of_presets), UNMOVED]
    make = [sys.executable, ROOT / "tools" / "make_quickstart.py", "--out", START]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen(
        [sys.executable, HERE / "preset_runs.py", made, *selected],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate("\n".join(OVERRIDES), timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return made


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_and_shows_its_metrics(directory: Path, preset: str) -> None:
    run = directory / preset
    assert not (run / "error.txt").exists(), (run / "error.txt").read_text()
    rows = metrics_of(run)
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        assert SHOWN[preset] - row.keys() == set()
        assert undocumented(row.keys() - {"step"}) == set()
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["rollout/logp_diff_max"] < 1e-4
        assert all(row[name] > 0 for name in row if name.endswith("/grad_norm"))


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_steps_in_which_no_group_is_kept_change_nothing(directory: Path) -> None:
    run = directory / UNMOVED
    assert not (run / "error.txt").exists(), (run / "error.txt").read_text()
    for row in metrics_of(run).values():
        assert (row["dynamic_sampling/prompts_tried"], row["dynamic_sampling/all_low"]) == (64, 1.0)
        assert "actor/loss" not in row and "reward/mean" not in row
    assert sorted(metrics_of(run)) == [1, 2]
