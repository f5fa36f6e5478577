"""Resolving rewards: every user's mistake is one error at start that names the key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlmegatron.rewards.api import Answer, as_score
from rlmegatron.rewards.table import REWARDS, resolve

MODULE = """
def constant(answer, *, value: float = 0.5, label: str | None = None):
    return value

def anything(answer, **options):
    return len(options)

def no_answer(*, value=1):
    return value

async def waits(answer):
    return 1.0

class Scaled:
    def __call__(self, answer, *, factor: int):
        return factor * len(answer.token_ids)

class Waiting:
    async def __call__(self, answer):
        return 1.0

scaled = Scaled()
waiting = Waiting()
hands_on = lambda answer: waits(answer)
number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_table_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_table_rewards", raising=False)
    return "my_table_rewards"


def answer(response: str = "5", **row: Any) -> Answer:
    return Answer("p", response, (1, 2, 3), "stop", row)


def test_a_table_name_is_bound_to_its_arguments() -> None:
    reward = resolve("exact_answer", {"answer_key": "label", "ignore_case": True})
    assert reward(answer("X", label="x")) == 1.0
    assert reward.is_linear and not resolve("regex", {"pattern": "x"}).is_linear


def test_a_users_function_in_the_working_directory_is_found(user_module: str) -> None:
    assert resolve(f"{user_module}:constant", {"value": 2})(answer()) == 2
    assert resolve(f"{user_module}:anything", {"a": 1, "b": 2})(answer()) == 2
    assert resolve(f"{user_module}:scaled", {"factor": 2})(answer()) == 6
    assert not resolve(f"{user_module}:constant", {}).is_linear


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "exct_answer",
            {},
            r"reward.name: 'exct_answer' is unknown; did you mean 'exact_answer'\?; use one of ex",
        ),
        (
            "exact_answer",
            {"anwser_key": "x"},
            r"reward.args.anwser_key: .*did you mean 'answer_key'\?; it has answer",
        ),
        ("exact_answer", {"answer": "x"}, "reward.args.answer: exact_answer has no such argument"),
        (
            "exact_answer",
            {"strip": "yes"},
            r"reward.args.strip: exact_answer .* 'yes' \(str\), must be bool",
        ),
        ("exact_answer", {"take": "end"}, "reward.args.take: .* must be one of 'whole', 'boxed'"),
        ("numeric_answer", {"abs_tol": True}, r"reward.args.abs_tol: .* True \(bool\), must be float"),
        ("numeric_answer", {"abs_tol": -1}, "reward.args.abs_tol: -1 is not allowed"),
        ("overlong", {"max_tokens": 5}, "^reward.args.buffer_tokens: missing; overlong needs buffer_tokens$"),
        (
            "overlong",
            {"max_tokens": 5, "buffer_tokens": 6},
            r"reward.args.buffer_tokens: 6 .* max_tokens \(5\)",
        ),
        ("regex", {"pattern": "("}, "reward.args.pattern: '\\(' is not a regular expression: missing"),
        ("format", {"sections": "a,a"}, "reward.args.sections: 'a,a' is not allowed"),
        ("no_such_module_x:f", {}, "reward.name: cannot import 'no_such_module_x' .*ModuleNotFoundError"),
        ("my_table_rewards:constnt", {}, r"has no 'constnt'; did you mean 'constant'\?"),
        ("my_table_rewards:number", {}, "is a int, not a function"),
        (
            "my_table_rewards:no_answer",
            {},
            r"no_answer takes \(\*, value=1\), but is called as no_answer\(answer, \*\*rew",
        ),
        ("my_table_rewards:constant", {"label": 3}, r"reward.args.label: .* 3 \(int\), must be str \| None"),
        ("my_table_rewards:scaled", {}, "^reward.args.factor: missing; my_table_rewards:scaled needs factor$"),
        ("my_table_rewards:scaled", {"factor": "2"}, "must be int"),
        ("combine", {}, "combine needs at least one reward name"),
        ("combine", {"exact_answer": "1"}, "reward.args.exact_answer: the weight .* is '1'"),
        ("combine", {"overlong.max_tokens": 3}, "combine has no weight for 'overlong'; add overlong: 1.0"),
        ("combine", {"exact_answer": 1.0, "exact_answer.strp": True}, r"^reward.args.exact_answer.strp: .*'strip'\?"),
        (
            "combine",
            {"exct_answer": 1.0},
            "^reward.args.exct_answer: 'exct_answer' is unknown; did you mean 'exact_answer'",
        ),
        ("combine", {"overlong": 1.0}, "^reward.args.overlong.max_tokens: missing; overlong needs max_tokens, buffer"),
        (
            "combine",
            {"overlong": 1.0, "overlong.max_tokens": 8, "overlong.buffer_tokens": 20},
            r"^reward.args.overlong.buffer_tokens: 20 is not allowed, must be .* max_tokens \(8\)$",
        ),
        (
            "combine",
            {"my_table_rewards:waits": 1},
            "^reward.args.my_table_rewards:waits: is asynchronous",
        ),
        ("combine", {"my_table_rewards:waiting": 1}, "^reward.args.my_table_rewards:waiting: is asynchronous, which c"),
    ],
)
def test_a_mistake_is_named(user_module: str, name: str, args: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name, args)


def test_a_module_that_ends_its_process_when_imported_is_named(user_module: str, tmp_path: Path) -> None:
    (tmp_path / "my_exiting_rewards.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ValueError, match=r"^reward.name: cannot import 'my_exiting_rewards' of .*: SystemExit: 3 \("):
        resolve("my_exiting_rewards:f", {})


def test_combine_adds_weighted_rewards_and_logs_each(user_module: str) -> None:
    args: dict[str, Any] = {
        "exact_answer": 1.0,
        "exact_answer.answer_key": "label",
        "overlong": 0.5,
        "overlong.max_tokens": 4,
        "overlong.buffer_tokens": 2,
        f"{user_module}:constant": -2,
        f"{user_module}:constant.value": 0.25,
    }
    # 3 tokens: overlong is (2 - 3) / 2 = -0.5; total 1 * 1 + 0.5 * -0.5 - 2 * 0.25 = 0.25
    score = as_score(resolve("combine", args)(answer("x", label="x")))
    assert score.reward == pytest.approx(0.25)
    assert score.parts == {"exact_answer": 1.0, "overlong": -0.5, f"{user_module}:constant": 0.25}


def test_combine_refuses_a_coroutine_that_only_a_call_shows(user_module: str) -> None:
    with pytest.raises(ValueError, match=f"^{user_module}:hands_on is asynchronous, which combine does not take$"):
        resolve("combine", {f"{user_module}:hands_on": 1.0})(answer())


def test_a_column_that_is_absent_is_one_of_answer_key_unless_said_otherwise() -> None:
    with pytest.raises(ValueError, match=r"no column 'solution'; it has 'label' \(set reward.args.answer_key\)$"):
        answer(label="x").column("solution")


def test_combine_is_linear_only_if_all_its_parts_are() -> None:
    assert resolve("combine", {"exact_answer": 1.0, "format": 0.1}).is_linear
    assert not resolve("combine", {"exact_answer": 1.0, "regex": 0.1, "regex.pattern": "x"}).is_linear


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "the reward is nan, must be a finite number"),
        (float("inf"), "the reward is inf"),
        (None, "the reward is None of type NoneType"),
        ("1", "the reward is '1' of type str"),
        ({"correct": 1.0}, "without 'reward'"),
        ({"reward": 1.0, "part": "x"}, "part 'part' is 'x'"),
        ({"reward": 1.0, "error": 0.0}, "a part named 'error'"),
    ],
)
def test_a_return_value_that_is_no_score_is_an_error(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_score(value)


def test_truth_values_and_numpy_numbers_are_scores() -> None:
    import numpy as np

    assert as_score(True).reward == 1.0
    assert as_score(np.float32(0.5)).reward == 0.5
    assert as_score({"reward": np.int64(2), "length": 3}).parts == {"length": 3.0}


def test_every_table_entry_resolves_and_importing_it_loads_no_torch() -> None:
    assert {"exact_answer", "numeric_answer", "regex", "format", "overlong"} == set(REWARDS)
    code = "import sys, rlmegatron.rewards.judge; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
