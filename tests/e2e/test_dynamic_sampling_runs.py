"""Dynamic sampling on real engines with a reward that never differs: the run ends and says why, or goes on unmoved.

That groups which differ are kept is shown by the preset `dapo` and by unit tests.
"""

from __future__ import annotations

import pytest
from jobs import Workspace, metrics_of
from test_run import load_export

CONSTANT = ("reward.name=user_rewards:constant", "rollout.dynamic_sampling.enabled=true", "eval.sets={}")


@pytest.mark.slow
def test_a_constant_reward_ends_the_run_with_what_was_tried(workspace: Workspace) -> None:
    outcome = workspace.run("name=shortage", *CONSTANT, "rollout.dynamic_sampling.max_prompts_ratio=3", ranks=1)
    assert outcome.code == 1
    report = outcome.report()
    assert "dynamic sampling, step 1: of 24 prompts tried, 0 have answers that differ in reward, of 8 needed" in report
    assert "24 groups agree on a value below 0.5 (too hard) and 0 on one of at least that (solved)" in report
    assert "Traceback" not in report


@pytest.mark.slow
def test_a_step_with_nothing_to_learn_from_moves_no_weight(workspace: Workspace) -> None:
    run = workspace.train(
        "unmoved",
        *CONSTANT,
        "rollout.dynamic_sampling={enabled: true, max_prompts_ratio: 2, on_shortage: train}",
        "train.steps=2",
        ranks=1,
    )
    for step in (1, 2):
        row = metrics_of(run)[step]
        assert row["dynamic_sampling/prompts_tried"] == 16
        assert (row["dynamic_sampling/differ"], row["dynamic_sampling/all_low"]) == (0.0, 1.0)
        assert "actor/loss" not in row
    before, _ = load_export(workspace.path / "model")
    after, _ = load_export(run / "export")
    for name, weight in before.state_dict().items():
        assert weight.equal(after.state_dict()[name]), name
