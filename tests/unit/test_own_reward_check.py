"""A reward of the user's own that cannot be used is one problem of the check, and its module runs once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmegatron.config.load import ConfigError
from rlmegatron.preflight import examine

MakeConfig = Callable[..., Path]


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        examine(str(path), overrides, world_size=None)
    return caught.value.problems


@pytest.mark.parametrize("reward", ["name: 'own_broken_reward:f'", "name: combine, args: {'own_broken_reward:f': 1}"])
def test_a_module_that_does_not_import_runs_once(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str
) -> None:
    text = "with open('runs.txt', 'a') as file:\n    file.write('x')\nraise ValueError('boom')\n"
    (tmp_path / "own_broken_reward.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (problem,) = problems(make_config(), f"reward={{{reward}}}")
    assert problem.endswith(
        "cannot import 'own_broken_reward' of 'own_broken_reward:f': ValueError: boom (own_broken_reward.py line 3)"
    )
    assert (tmp_path / "runs.txt").read_text() == "x"


def test_an_error_of_several_lines_is_one_problem(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_long_error.py").write_text("raise ImportError('no such card\\ntry another\\nor none')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (problem,) = problems(make_config(), "reward={name: 'own_long_error:f'}")
    assert problem.endswith("ImportError: no such card (own_long_error.py line 1)\n    try another\n    or none")


def test_columns_are_looked_for_only_by_a_reward_whose_arguments_fit(make_config: MakeConfig) -> None:
    (problem,) = problems(make_config(), "reward.args.anser_key=x")
    assert problem.startswith("reward.args.anser_key: ")
    (problem,) = problems(make_config(), "reward.args.answer_key=x")
    assert "line 1: the row has no column 'x'" in problem
