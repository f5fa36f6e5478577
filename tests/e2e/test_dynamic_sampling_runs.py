"""Dynamic sampling on real engines with a reward that never differs: the run ends and says why.

That it may go on unmoved, and that groups which differ are kept, is shown beside the presets and by unit tests.
"""

from __future__ import annotations

import pytest
from jobs import Workspace

CONSTANT = ("reward.name=user_rewards:constant", "rollout.dynamic_sampling.enabled=true", "eval.sets={}")


@pytest.mark.slow
def test_a_constant_reward_ends_the_run_with_what_was_tried(workspace: Workspace) -> None:
    outcome = workspace.run("name=shortage", *CONSTANT, "rollout.dynamic_sampling.max_prompts_ratio=3", ranks=1)
    assert outcome.code == 1
    report = outcome.report()
    assert "dynamic sampling, step 1: of 24 prompts tried, 0 have answers that differ in reward, of 8 needed" in report
    assert "24 groups agree on a value below 0.5 (too hard) and 0 on one of at least that (solved)" in report
    assert "Traceback" not in report
