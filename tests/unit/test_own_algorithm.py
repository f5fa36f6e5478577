"""A function of the user's own that `algorithm` names is imported and fitted before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlmegatron.config.load import ConfigError
from rlmegatron.preflight import examine

MakeConfig = Callable[..., Path]

OWN = """
def advantage(rewards, group_ids): ...
def greedy(rewards, greedy_rewards): ...
def critics(token_rewards, mask, cu_seqlens, values): ...
def loss(logp, advantages, weights): ...
def trl_loss(logprobs, old_logprobs, advantages): ...
"""


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in a working directory that is not on the path."""
    modules = {
        "own_algorithm": OWN,
        "own_syntax": "def f(:",
        "own_error": "raise ValueError('boom')",
        "own_script": "import sys\nsys.exit(3)",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in modules:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own_modules")
def test_functions_in_the_working_directory_pass_the_check(make_config: MakeConfig) -> None:
    names = ["algorithm.advantage=own_algorithm:advantage", "algorithm.policy_loss=own_algorithm:loss"]
    examine(str(make_config()), names, world_size=None)
    critic = ["algorithm.advantage=own_algorithm:critics", "critic.enabled=true"]
    assert examine(str(make_config()), critic, world_size=None).cfg.trains_critic


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.advantage=own_algorithm:advantag"],
            "algorithm.advantage 'own_algorithm:advantag': module 'own_algorithm' has no function 'advantag'; did you "
            "mean 'advantage'?",
        ),
        (
            ["algorithm.policy_loss=own_algorithm:trl_loss"],
            "algorithm.policy_loss 'own_algorithm:trl_loss': must take the parameters logp, advantages, weights; it "
            "lacks logp, weights",
        ),
        (
            ["algorithm.policy_loss=own_absent:loss"],
            "algorithm.policy_loss: cannot import 'own_absent' of 'own_absent:loss': ModuleNotFoundError: No module "
            "named 'own_absent'",
        ),
        (
            ["algorithm.advantage=own_syntax:f"],
            "algorithm.advantage: cannot import 'own_syntax' of 'own_syntax:f': SyntaxError: invalid syntax "
            "(own_syntax.py, line 1)",
        ),
        (
            ["algorithm.advantage=own_error:f"],
            "algorithm.advantage: cannot import 'own_error' of 'own_error:f': ValueError: boom",
        ),
        (
            ["algorithm.advantage=own_script:f"],
            "algorithm.advantage: cannot import 'own_script' of 'own_script:f': SystemExit: 3",
        ),
        (
            ["algorithm.advantage=own_algorithm:greedy", "reward.whiten=true"],
            "reward.whiten: true cannot go with algorithm.advantage 'own_algorithm:greedy', which compares with the "
            "reward of another answer; use algorithm.whiten, which acts on advantages",
        ),
        (
            ["algorithm.advantage=own_algorithm:critics"],
            "algorithm.advantage: 'own_algorithm:critics' takes 'values', which come from a critic; set "
            "critic.enabled: true",
        ),
        (
            ["algorithm.advantage=own_algorithm:advantage", "critic.enabled=true"],
            "critic.enabled: true is given, but algorithm.advantage 'own_algorithm:advantage' does not take 'values'; "
            "remove it",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_one_problem_of_the_check(
    make_config: MakeConfig, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        examine(str(make_config()), overrides, world_size=None)
    assert caught.value.problems == (expected,)
