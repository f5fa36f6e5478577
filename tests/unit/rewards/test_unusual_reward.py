"""Own rewards that Python cannot describe, or that are not where they are said to be: the answer has key and name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rlmegatron.rewards.api import Answer
from rlmegatron.rewards.table import resolve


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def refusal(name: str) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(name, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "annotation"),
    [
        ("odd_hint_text", "'between 0 and 1'"),
        ("odd_hint_attribute", "math.no_such_type"),
        ("odd_hint_union", "\"list[str] | 'None'\""),
        ("odd_hint_name", "NoSuchName"),
    ],
)
def test_annotations_that_are_no_types_are_no_obstacle(tmp_path: Path, module: str, annotation: str) -> None:
    text = "from __future__ import annotations\nimport math\n"
    (tmp_path / f"{module}.py").write_text(f"{text}def score(answer, weight: {annotation} = 1.0): return weight\n")
    assert resolve(f"{module}:score", {"weight": 0.5})(Answer("", "", (), "stop", {})) == 0.5


def test_a_name_that_a_module_lacks_comes_with_where_the_module_is(tmp_path: Path) -> None:
    (tmp_path / "odd_folder").mkdir()
    assert refusal("time:score") == "reward.name: time (built into Python) has no 'score'"
    assert refusal("odd_folder:score") == (
        f"reward.name: odd_folder (the folder {tmp_path}/odd_folder, without an __init__.py) has no 'score'"
    )


def test_what_a_module_raises_when_asked_for_the_function_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "odd_lazy.py").write_text("def __getattr__(name):\n    raise KeyError(name)\n")
    assert refusal("odd_lazy:score") == (
        "reward.name: cannot get 'score' of odd_lazy: KeyError: 'score' (odd_lazy.py line 2)"
    )


def test_a_callable_without_a_signature_is_named() -> None:
    assert refusal("builtins:dict").startswith(
        "reward.name: builtins:dict is a type whose arguments Python cannot tell"
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("./my.py:score", "my:score"),
        ("my.py:score", "my:score"),
        ("sub/my:score", "sub.my:score"),
        ("sub/my.py:Scores.one", "sub.my:Scores.one"),
        ("/elsewhere/my.py:score", "my:score, with /elsewhere on PYTHONPATH"),
    ],
)
def test_a_file_is_answered_with_its_module(given: str, meant: str) -> None:
    assert refusal(given) == f"reward.name: {given!r} is not allowed; name a module, not a file: {meant}"
    with pytest.raises(ValueError, match=f"^reward.args.{re.escape(given.partition('.one')[0])}: "):
        resolve("combine", {given.partition(".one")[0]: 1.0})


def test_the_place_of_an_error_is_the_last_line_of_the_users_own_code(tmp_path: Path) -> None:
    (tmp_path / "odd_outer.py").write_text("x = 1\nimport odd_inner\n")
    (tmp_path / "odd_inner.py").write_text("import json\n\njson.loads('{')\n")
    assert refusal("odd_outer:f").endswith("(char 1) (odd_inner.py line 3)")
    (tmp_path / "odd_missing.py").write_text("\nimport no_such_package_here\n")
    assert refusal("odd_missing:f").endswith(
        "ModuleNotFoundError: No module named 'no_such_package_here' (odd_missing.py line 2)"
    )
    (tmp_path / "odd_assert.py").write_text("assert False\n")
    assert refusal("odd_assert:f").endswith(": AssertionError (odd_assert.py line 1)")
