"""The table of rewards, and `resolve`, which turns a name and its arguments into a checked `Reward`.

In: a table name, 'combine', or 'package.module:function', with scalar arguments. Out: a `Reward`, or a ValueError that
names the argument. Must never import torch; user modules are found on sys.path and in the working directory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from types import ModuleType
from typing import Any

from rlmegatron.config.own_module import import_own_module, reason_of
from rlmegatron.rewards.api import Answer, RewardFunction
from rlmegatron.rewards.combine import WeightedReward, split_parts, weighted_sum
from rlmegatron.rewards.exact import exact_answer
from rlmegatron.rewards.length import check_overlong, overlong
from rlmegatron.rewards.numeric import check_numeric_answer, numeric_answer
from rlmegatron.rewards.pattern import check_regex, regex
from rlmegatron.rewards.signature import Scalar, check_arguments, question
from rlmegatron.rewards.structure import check_tagged_format, tagged_format


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the table."""

    function: RewardFunction
    is_linear: bool = True
    """Takes time linear in the response, so the judge may call it in its own process, without a time-out."""
    check: Callable[..., None] | None = None
    """Raises ValueError for arguments of the right type with a wrong value."""


REWARDS: dict[str, Entry] = {
    "exact_answer": Entry(exact_answer),
    "numeric_answer": Entry(numeric_answer, check=check_numeric_answer),
    "regex": Entry(regex, is_linear=False, check=check_regex),
    "format": Entry(tagged_format, check=check_tagged_format),
    "overlong": Entry(overlong, check=check_overlong),
}
COMBINE = "combine"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward whose name and arguments were checked; `name` and `args` are enough to resolve it in another process."""

    name: str
    function: RewardFunction
    args: Mapping[str, Scalar] = field(default_factory=dict)
    is_linear: bool = False

    def __call__(self, answer: Answer) -> Any:
        """What the function returns for `answer`, unchecked; a coroutine if the function is asynchronous."""
        return self.function(answer, **self.args)


def resolve(name: str, args: Mapping[str, Scalar]) -> Reward:
    """The reward `name` with `args` bound.

    name: a key of `REWARDS`; 'package.module:function'; or 'combine', whose args give weights by name and the parts'
    own arguments as 'name.argument': {"exact_answer": 1.0, "overlong": 0.5, "overlong.max_tokens": 1024, ...}.
    Raises ValueError, naming reward.name or reward.args.KEY, for an unknown name, a module or function that cannot be
    imported, an unknown or missing argument, and an argument of the wrong type or value.
    """
    if name == COMBINE:
        return _resolve_combine(args)
    entry = REWARDS.get(name) or Entry(_import_function(name), is_linear=False)
    check_arguments(name, entry.function, args)
    if entry.check is not None:
        entry.check(**args)
    return Reward(name, entry.function, dict(args), entry.is_linear)


def _resolve_combine(args: Mapping[str, Scalar]) -> Reward:
    rewards: list[WeightedReward] = []
    is_linear = True
    for part in split_parts(args):
        try:
            reward = resolve(part.name, part.args)
        except ValueError as error:
            raise ValueError(_below_part(part.name, str(error))) from error
        if _is_asynchronous(reward.function):
            raise ValueError(f"reward.args.{part.name}: is asynchronous, which combine does not take")
        rewards.append(WeightedReward(part.name, part.weight, reward))
        is_linear = is_linear and reward.is_linear

    def combined(answer: Answer, **_: Scalar) -> dict[str, float]:
        return weighted_sum(rewards, answer)

    return Reward(COMBINE, combined, dict(args), is_linear)


def _is_asynchronous(function: RewardFunction) -> bool:
    """Whether calling it makes a coroutine, as far as can be told beforehand: an object's class says it too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _below_part(part: str, complaint: str) -> str:
    """A complaint about a reward by itself, with the key that `combine` has for it: its argument's, or its weight's."""
    return f"reward.args.{part}{complaint.removeprefix('reward.name').removeprefix('reward.args')}"


def _import_function(name: str) -> RewardFunction:
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        names = [*REWARDS, COMBINE]
        raise ValueError(
            f"reward.name: {name!r} is unknown{question(name, names)}; "
            f"use one of {', '.join(names)}, or 'package.module:function'"
        )
    try:
        module = import_own_module(name)
    except ValueError as error:
        raise ValueError(f"reward.name: {error}") from error
    try:
        function: RewardFunction = reduce(getattr, path.split("."), module)  # type: ignore[assignment]
    except AttributeError:
        nearest = question(path, [key for key in vars(module) if not key.startswith("_")])
        raise ValueError(f"reward.name: {module_name} ({_origin(module)}) has no {path!r}{nearest}") from None
    except (Exception, SystemExit) as error:  # a module's own __getattr__ may do anything
        raise ValueError(f"reward.name: cannot get {path!r} of {module_name}: {reason_of(error)}") from error
    if not callable(function):
        raise ValueError(f"reward.name: {name!r} is a {type(function).__name__}, not a function")
    return function


def _origin(module: ModuleType) -> str:
    """Where a module comes from, which tells a file that shadows another, or a folder that was meant for a module."""
    if file := vars(module).get("__file__"):
        return str(file)
    folders = list(vars(module).get("__path__", ()))
    return f"the folder {folders[0]}, without an __init__.py" if folders else "built into Python"
