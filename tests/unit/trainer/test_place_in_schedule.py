"""Where a resumed run is in its learning-rate schedule."""

from __future__ import annotations

from typing import Any

import pytest

from rlmegatron.trainer.state import place_in_schedule


@pytest.mark.parametrize(
    ("taken", "before", "now", "expected"),
    [
        (800, 16, 4, 200),  # half of a hundred steps: still half, where 800 of 400 would be past the end
        (200, 4, 16, 800),
        (797, 16, 16, 797),  # three updates were left out for max_kl
        (5, 2, 3, 8),
    ],
)
def test_the_share_of_the_schedule_that_has_passed_stays(taken: int, before: int, now: int, expected: int) -> None:
    state = {"optimizer_steps": {"actor": taken}, "updates_per_step": {"actor": before}}
    assert place_in_schedule(state, "actor", updates_per_step=now) == expected


def test_a_checkpoint_that_does_not_say_is_of_as_many_updates_as_now() -> None:
    state: dict[str, Any] = {"optimizer_steps": {"critic": 7}}
    assert place_in_schedule(state, "critic", updates_per_step=3) == 7
