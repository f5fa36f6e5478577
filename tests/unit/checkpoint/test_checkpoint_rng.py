"""Random generators go on where they were saved, through the JSON of a checkpoint."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from rlmegatron.checkpoint.rng import rng_state, seed_rng, set_rng_state


def draws() -> list[float]:
    """An odd number of Gaussians, so that generators which make them in pairs hold one back."""
    return [
        *(random.gauss(0, 1) for _ in range(3)),
        *np.random.randn(3).tolist(),
        *torch.randn(3).tolist(),
        random.random(),
        float(np.random.rand()),
    ]


@pytest.fixture(autouse=True)
def keep_the_generators() -> object:
    state = rng_state()
    yield
    set_rng_state(state)


def test_generators_go_on_where_they_were_saved() -> None:
    seed_rng(1, 2, 3)
    draws()
    saved = json.loads(json.dumps(rng_state()))
    expected = draws()
    seed_rng(9, 9, 9)
    assert draws() != expected
    set_rng_state(saved)
    assert draws() == expected


def test_seed_step_and_rank_each_change_the_draws() -> None:
    def first(*place: int) -> list[float]:
        seed_rng(*place)
        return draws()

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    found = [first(*place) for place in places]
    assert [first(*place) for place in places] == found
    for column in zip(*found, strict=True):
        assert len(set(column)) == len(places)
