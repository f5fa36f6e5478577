"""Reward functions as other libraries write them are told from ours at start, and the documented adapter fits them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlmegatron.rewards.api import Answer, as_score
from rlmegatron.rewards.table import resolve

DOCS = Path(__file__).parents[3] / "docs" / "algorithms.md"
MODULE = """
import typing
from rlmegatron.rewards.api import Answer as Ours

def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def verl_older(solution_str, ground_truth): ...
def trl(completions, **kwargs): ...
def trl_typed(answers: list[str], **kwargs) -> list[float]: ...
def openrlhf(queries, prompts, labels): ...
def of_text(text: str): ...
def by_position(answer, truth, /): ...
def slime(args, sample, **kwargs): ...
def factor(answer, factor): ...

def untyped(anything): return 1.0
def typed(a: Ours): return 1.0
def of_anything(a: typing.Any): return 1.0
def of_an_object(a: object): return 1.0
def maybe(a: "Ours | None"): return 1.0
def variadic(*args): return 1.0
class Shape(typing.Protocol):
    response: str
def by_shape(a: Shape): return 1.0
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reward_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_reward_module", raising=False)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        ("verl", "(data_source, solution_str, ground_truth, extra_info=None)"),
        ("verl_older", "(solution_str, ground_truth)"),
        ("trl", "(completions, **kwargs)"),
        ("trl_typed", "(answers: list[str], **kwargs) -> list[float]"),
        ("openrlhf", "(queries, prompts, labels)"),
        ("of_text", "(text: str)"),
        ("by_position", "(answer, truth, /)"),
    ],
)
def test_a_function_that_takes_no_answer_first_is_shown_how_it_is_called(function: str, signature: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(f"own_reward_module:{function}", {})
    assert str(caught.value) == (
        f"reward.name: own_reward_module:{function} takes {signature}, but is called as {function}(answer, "
        f"**reward.args) for one answer after the other; write 'def {function}(answer, *, any_argument=...)', which "
        f"reads answer.response and answer.row, or an adapter (docs/algorithms.md, Rewards)"
    )


def test_within_combine_it_is_the_weights_key_that_is_named() -> None:
    with pytest.raises(ValueError, match=r"^reward.args.own_reward_module:trl: own_reward_module:trl takes \(comple"):
        resolve("combine", {"own_reward_module:trl": 1.0})


def test_a_missing_argument_says_how_it_is_called_where_the_first_may_be_meant_for_something_else() -> None:
    with pytest.raises(ValueError, match=r"needs sample; it is called as slime\(answer, \*\*reward.args\)$"):
        resolve("own_reward_module:slime", {})
    with pytest.raises(ValueError, match="^reward.args.factor: missing; own_reward_module:factor needs factor$"):
        resolve("own_reward_module:factor", {})


@pytest.mark.parametrize(
    "function", ["untyped", "typed", "of_anything", "of_an_object", "maybe", "variadic", "by_shape"]
)
def test_a_function_that_may_take_an_answer_is_let_pass(function: str) -> None:
    assert resolve(f"own_reward_module:{function}", {})(Answer("", "", (), "stop", {})) == 1.0


def documented_adapter(compute_score: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The reward that docs/algorithms.md shows, around `compute_score`."""
    section = DOCS.read_text(encoding="utf-8").partition("## Rewards")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    name = re.findall(r'name: "(\w+):(\w+)"', code)[0]
    (tmp_path / f"{name[0]}.py").write_text(code)
    theirs = ModuleType("my_verl_reward")
    theirs.compute_score = compute_score  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_verl_reward", theirs)
    monkeypatch.delitem(sys.modules, name[0], raising=False)
    return resolve(":".join(name), {})


@pytest.mark.parametrize("wraps", [False, True])
def test_the_documented_adapter_calls_a_function_of_verl(
    wraps: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        assert (data_source, extra_info) == ("gsm8k", {"index": 3})
        score = float(solution_str == ground_truth)
        return {"score": score, "pred": "a text"} if wraps else score

    reward = documented_adapter(compute_score, monkeypatch, tmp_path)
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 3}}
    assert [as_score(reward(Answer("p", text, (1,), "stop", row))).reward for text in ("2", "3")] == [1.0, 0.0]
