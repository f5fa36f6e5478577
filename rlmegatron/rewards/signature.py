"""Whether a reward can be called as the judge calls it: `reward(answer, **reward.args)`, once for each answer.

In: a function and the arguments of the configuration. Out: nothing, or ValueError that names the key and shows what is
called. Must never import torch or call the function.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rlmegatron.config.wording import did_you_mean
from rlmegatron.rewards.api import Answer, RewardFunction

Scalar = str | int | float | bool | None

_FIRST_ELSEWHERE = (
    *("data_source", "solution_str", "ground_truth"),
    *("completions", "prompts", "queries", "responses"),
    *("reward_input", "reward_inputs"),
)
"""First parameters of the reward functions of verl, TRL, OpenRLHF and EasyR1: texts, or whole batches of them."""
_DATA_MODULES = ("builtins", "collections.abc")
"""Where the types are that no answer is of."""


def check_arguments(name: str, function: RewardFunction, args: Mapping[str, Scalar]) -> None:
    """Raises ValueError unless `function(answer, **args)` fits the function's signature and annotations."""
    signature = _signature(name, function)
    parameters = list(signature.parameters.values())
    hints = _type_hints(function)
    if not _takes_answer_first(parameters, hints):
        raise ValueError(
            f"reward.name: {name} takes {signature}, but is called as {_called(name)} for one answer "
            f"after the other; write 'def {_own_name(name)}(answer, *, any_argument=...)', which reads answer.response "
            f"and answer.row, or an adapter (docs/algorithms.md, Rewards)"
        )
    first, *others = parameters
    named = {one.name: one for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    is_open = any(one.kind is one.VAR_KEYWORD for one in others)
    for key in args:
        if key not in named and not (is_open and key != first.name):
            allowed = ", ".join(named) or "none"
            raise ValueError(f"reward.args.{key}: {name} has no such argument{question(key, named)}; it has {allowed}")
    missing = [key for key, one in named.items() if one.default is one.empty and key not in args]
    if missing:
        positional = any(named[key].kind is first.POSITIONAL_OR_KEYWORD for key in missing)
        how = f"; it is called as {_called(name)}" if positional and first.name != "answer" else ""
        raise ValueError(f"reward.args.{missing[0]}: missing; {name} needs {', '.join(missing)}{how}")
    for key, value in args.items():
        if key in hints and not _fits(value, hints[key]):
            given = f"{value!r} ({type(value).__name__})"
            raise ValueError(f"reward.args.{key}: {name} does not take {given}, must be {_spell(hints[key])}")


def _takes_answer_first(parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> bool:
    """Whether the one argument given by position may be an `Answer`, and is the only one that must be."""
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        return False
    first, *others = parameters
    if any(one.kind is one.POSITIONAL_ONLY and one.default is one.empty for one in others):
        return False
    return _may_be_answer(hints[first.name]) if first.name in hints else first.name not in _FIRST_ELSEWHERE


def _may_be_answer(hint: Any) -> bool:
    """False for an annotation by plain data; a class that only looks like `Answer` is let pass."""
    origin = typing.get_origin(hint)
    if origin is typing.Union or origin is types.UnionType:
        return any(_may_be_answer(one) for one in typing.get_args(hint))
    kind = origin or hint
    return not (inspect.isclass(kind) and kind.__module__ in _DATA_MODULES) or issubclass(Answer, kind)


def _called(name: str) -> str:
    return f"{_own_name(name)}(answer, **reward.args)"


def _own_name(name: str) -> str:
    """'score' of 'package.module:score'."""
    return name.rpartition(":")[2]


def _signature(name: str, function: RewardFunction) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise ValueError(
            f"reward.name: {name} is a {type(function).__name__} whose arguments Python cannot tell; call it from a "
            f"'def' of your own, which takes the answer (docs/algorithms.md, Rewards)"
        ) from None


def _type_hints(function: RewardFunction) -> dict[str, Any]:
    """Annotations by argument; none where they are no types, or only a type checker's."""
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    try:
        return typing.get_type_hints(target)
    except Exception:  # they are evaluated, so anything may come of them; a reward can be called all the same
        return {}


def _fits(value: Scalar, hint: Any) -> bool:
    """Whether a scalar fits an annotation; annotations that are no scalars, and none at all, take anything."""
    origin = typing.get_origin(hint)
    if origin is typing.Union or origin is types.UnionType:
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    return True


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if inspect.isclass(hint) else str(hint)


def question(name: str, allowed: Iterable[str]) -> str:
    """'; did you mean ...?', or nothing."""
    hint = did_you_mean(name, allowed)
    return f"; {hint}" if hint else ""
