"""The columns that rewards of the table read: nested ones, and those that are not there, known before a run starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from rlmegatron.rewards import table
from rlmegatron.rewards.api import Answer, ColumnError
from rlmegatron.rewards.columns import column_problems
from rlmegatron.rewards.table import Entry, resolve

ROW: dict[str, Any] = {
    "prompt": "1+1=",
    "answer": "2",
    "a.b": "dotted",
    "a": {"b": "nested"},
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "empty": {},
}
COLUMNS = "it has 'prompt', 'answer', 'a.b', 'a', 'reward_model', 'empty'"


def answer(response: str, row: Mapping[str, Any] = ROW) -> Answer:
    return Answer("p", response, (1,), "stop", row)


def problems(name: str, args: Mapping[str, Any], *, row: Mapping[str, Any] = ROW, stops_at_error: bool = True) -> Any:
    return column_problems(name, args, {"f line 1": row}, stops_at_error=stops_at_error)


@pytest.mark.parametrize("name", ["exact_answer", "numeric_answer"])
def test_a_dotted_key_reaches_into_a_nested_column(name: str) -> None:
    reward = resolve(name, {"answer_key": "reward_model.ground_truth"})
    assert (reward(answer("2")), reward(answer("3"))) == (1.0, 0.0)
    assert problems(name, {"answer_key": "reward_model.ground_truth"}) == []


def test_a_column_of_that_very_name_goes_before_a_nested_one() -> None:
    assert answer("").column("a.b", argument="answer_key") == "dotted"
    assert answer("", {"a": ROW["a"]}).column("a.b", argument="answer_key") == "nested"


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("solution", f"the row has no column 'solution'; {COLUMNS}"),
        ("reward.ground_truth", f"the row has no column 'reward' of 'reward.ground_truth'; {COLUMNS}"),
        ("reward_model.truth", "column 'reward_model' of the row has no 'truth'; it has 'style', 'ground_truth'"),
        ("answer.text", "column 'answer' of the row has no 'text'; it is '2'"),
        ("reward_model.style.x", "column 'reward_model.style' of the row has no 'x'; it is 'rule'"),
        ("empty.x", "column 'empty' of the row has no 'x'; it has nothing"),
    ],
)
def test_what_is_missing_of_a_column_and_what_is_there_are_named(key: str, complaint: str) -> None:
    message = f"{complaint} (set reward.args.answer_key)"
    with pytest.raises(ColumnError, match=f"^{re.escape(message)}$"):
        resolve("exact_answer", {"answer_key": key})(answer("2"))
    assert problems("exact_answer", {"answer_key": key}) == [f"f line 1: {message}"]


def test_the_column_of_a_combined_reward_is_named_by_the_combinations_argument() -> None:
    args = {"overlong": 0.5, "overlong.max_tokens": 8, "overlong.buffer_tokens": 2, "exact_answer": 1.0}
    assert problems("combine", args) == []
    args["exact_answer.answer_key"] = "solution"  # type: ignore[assignment]
    message = f"the row has no column 'solution'; {COLUMNS} (set reward.args.exact_answer.answer_key)"
    assert problems("combine", args) == [f"f line 1: {message}"]
    with pytest.raises(ColumnError, match=re.escape(message)):
        resolve("combine", args)(answer("2"))


def test_every_row_is_looked_at() -> None:
    rows = {"a line 1": ROW, "b line 2": {"prompt": "1="}, "c row 1": {}}
    assert column_problems("numeric_answer", {}, rows, stops_at_error=True) == [
        "b line 2: the row has no column 'answer'; it has 'prompt' (set reward.args.answer_key)",
        "c row 1: the row has no column 'answer'; it has nothing (set reward.args.answer_key)",
    ]


def test_a_reference_that_is_none_is_a_problem_only_where_it_would_stop_the_run() -> None:
    args = {"answer_key": "reward_model"}
    (line,) = problems("exact_answer", args)
    assert line.startswith("f line 1: column 'reward_model' holds {'style'") and "needs a string" in line
    assert problems("exact_answer", args, stops_at_error=False) == []
    assert len(problems("exact_answer", {"answer_key": "solution"}, stops_at_error=False)) == 1


def test_what_reads_no_column_and_functions_of_the_users_own_have_no_problem_of_columns() -> None:
    assert problems("format", {}, row={}) == problems("regex", {"pattern": "x"}, row={}) == []
    assert problems("nowhere:f", {}, row={}) == problems("combine", {"nowhere:f": 1}, row={}) == []


def test_a_reward_that_may_take_for_ever_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(answer: Answer) -> float:
        raise ValueError("called")

    monkeypatch.setitem(table.REWARDS, "never", Entry(never, is_linear=False))
    assert problems("never", {}) == problems("combine", {"never": 1.0}) == []
