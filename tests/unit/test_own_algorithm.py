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
def clipped(logp, old_logp, advantages, weights, clip_low, clip_high): ...
def everything(**inputs): ...
def value_loss(values, returns, weights, clip=0.1): ...
def clipped_value_loss(values, returns, weights, value_clip): ...
"""


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules in a working directory that is not on the path."""
    modules = {
        "own_algorithm": OWN,
        "own_syntax": "def f(:",
        "own_error": "raise ValueError('boom')",
        "own_script": "import sys\nsys.exit(3)",
        "own_lines": "def f():\n\n    raise RuntimeError('\\nno such card\\ntry another\\n  or none\\n')\nf()",
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
            ["algorithm.policy_loss=./own_algorithm.py:loss"],
            "algorithm.policy_loss: './own_algorithm.py:loss' is not allowed; name a module, not a file: "
            "own_algorithm:loss",
        ),
        (
            ["algorithm.advantage=own_syntax:f"],
            "algorithm.advantage: cannot import 'own_syntax' of 'own_syntax:f': SyntaxError: invalid syntax "
            "(own_syntax.py, line 1)",
        ),
        (
            ["algorithm.advantage=own_error:f"],
            "algorithm.advantage: cannot import 'own_error' of 'own_error:f': ValueError: boom (own_error.py line 1)",
        ),
        (
            ["algorithm.advantage=own_script:f"],
            "algorithm.advantage: cannot import 'own_script' of 'own_script:f': SystemExit: 3 (own_script.py line 2)",
        ),
        (
            ["algorithm.advantage=own_lines:f"],
            "algorithm.advantage: cannot import 'own_lines' of 'own_lines:f': RuntimeError: no such card (own_lines.py "
            "line 3)\n    try another\n      or none",
        ),
        (
            ["algorithm.advantage=own_error.py:f"],
            "algorithm.advantage: 'own_error.py:f' is not allowed; name a module, not a file: own_error:f",
        ),
        (
            ["algorithm.advantage=builtins:dict"],
            "algorithm.advantage 'builtins:dict': is a type whose parameters Python cannot tell; use a 'def'",
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


CRITIC = ("algorithm.advantage=own_algorithm:critics", "critic.enabled=true")


def reported(path: Path, *overrides: str) -> list[str]:
    return [line.strip() for line in examine(str(path), overrides, world_size=None).report().splitlines()]


def warned(path: Path, *overrides: str) -> list[str]:
    return examine(str(path), overrides, world_size=None).warnings


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.policy_loss=own_algorithm:loss"],
            ["loss       own_algorithm:loss, given logp, advantages and weights, token_mean"],
        ),
        (
            ["algorithm.policy_loss=own_algorithm:clipped", "algorithm.clip_high=0.28"],
            [
                "loss       own_algorithm:clipped, given logp, advantages, weights, old_logp, clip_low 0.2 and "
                "clip_high 0.28, token_mean"
            ],
        ),
        (
            ["algorithm.advantage=own_algorithm:greedy"],
            [
                "advantage  own_algorithm:greedy, given rewards and the reward of the greedy answer to the prompt (16 "
                "more a step)",
            ],
        ),
        (
            [*CRITIC, "algorithm.value_loss=own_algorithm:value_loss"],
            [
                "advantage   own_algorithm:critics, given token_rewards, mask, cu_seqlens and the critic's values",
                "value loss  own_algorithm:value_loss, given values, returns and weights",
            ],
        ),
        (
            [*CRITIC, "algorithm.value_loss=own_algorithm:clipped_value_loss"],
            ["value loss  own_algorithm:clipped_value_loss, given values, returns, weights and value_clip 0.2"],
        ),
    ],
)
def test_the_report_names_every_input_of_a_function_and_nothing_that_it_does_not_take(
    make_config: MakeConfig, overrides: list[str], expected: list[str]
) -> None:
    lines = reported(make_config(), *overrides)
    assert [line for line in expected if line not in lines] == []


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm={policy_loss: 'own_algorithm:loss', clip_low: 0.1, clip_high: 0.28, dual_clip: 3}"],
            [
                "algorithm.clip_low: 0.1 has no effect on policy_loss 'own_algorithm:loss'",
                "algorithm.clip_high: 0.28 has no effect on policy_loss 'own_algorithm:loss'",
                "algorithm.dual_clip: 3 has no effect on policy_loss 'own_algorithm:loss'",
            ],
        ),
        (
            ["algorithm={advantage: 'own_algorithm:advantage', gamma: 0.9, lam: 0.5, normalize_std: false}"],
            [
                "algorithm.normalize_std: false has no effect on advantage 'own_algorithm:advantage'",
                "algorithm.gamma: 0.9 has no effect on advantage 'own_algorithm:advantage'",
                "algorithm.lam: 0.5 has no effect on advantage 'own_algorithm:advantage'",
            ],
        ),
        (
            [*CRITIC, "algorithm.value_loss=own_algorithm:value_loss", "algorithm.value_clip=null"],
            ["algorithm.value_clip: null has no effect on value_loss 'own_algorithm:value_loss'"],
        ),
        # What a function names, or gets by **kwargs, is taken; defaults are nobody's wish.
        (["algorithm={policy_loss: 'own_algorithm:clipped', clip_low: 0.1}"], []),
        (["algorithm={policy_loss: 'own_algorithm:everything', clip_high: 0.28, dual_clip: 3}"], []),
        (["algorithm.policy_loss=own_algorithm:loss"], []),
    ],
)
def test_a_changed_setting_that_a_function_does_not_take_is_warned_of(
    make_config: MakeConfig, overrides: list[str], expected: list[str]
) -> None:
    assert [line for line in warned(make_config(), *overrides) if "no effect" in line] == expected


@pytest.mark.usefixtures("own_modules")
def test_a_setting_of_a_critic_that_is_not_there_is_warned_of_once(make_config: MakeConfig) -> None:
    lines = warned(make_config(), "algorithm={value_loss: 'own_algorithm:value_loss', value_clip: null}")
    assert [line for line in lines if "value_clip" in line] == [
        "algorithm.value_clip: null has no effect without a critic"
    ]
