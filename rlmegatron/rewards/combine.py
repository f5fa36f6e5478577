"""`combine`: the weighted sum of several rewards, each of which is logged as a part.

In: scalar arguments, weights by reward name and the rewards' own arguments as 'name.argument'. Out: the parts with
their weights, and the sum. Must never import torch or the table, which resolves the names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmegatron.rewards.api import Answer, ColumnError, as_score


@dataclass(slots=True)
class Part:
    """One reward of a combination, not yet resolved."""

    name: str
    weight: float
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One resolved reward of a combination."""

    name: str
    weight: float
    function: Callable[[Answer], Any]


def split_parts(args: Mapping[str, Any]) -> list[Part]:
    """The parts that {"exact_answer": 1.0, "overlong": 0.5, "overlong.max_tokens": 1024} names.

    In 'package.module:function' only a dot after the colon starts an argument. Raises ValueError for no part, a weight
    that is no finite number, and an argument of a part that has no weight.
    """
    keys = [(_split_key(key), value) for key, value in args.items()]
    parts: dict[str, Part] = {}
    for (name, argument), value in keys:
        if argument is None:
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"reward.args.{name}: the weight of a combined reward is {value!r}, must be a number")
            parts[name] = Part(name, float(value))
    for (name, argument), value in keys:
        if argument is not None:
            if name not in parts:
                raise ValueError(f"reward.args.{name}.{argument}: combine has no weight for {name!r}; add {name}: 1.0")
            parts[name].args[argument] = value
    if not parts:
        raise ValueError("reward.args: combine needs at least one reward name with its weight")
    return list(parts.values())


def weighted_sum(rewards: Sequence[WeightedReward], answer: Answer) -> dict[str, float]:
    """'reward': the sum of weight * reward, and every reward, unweighted, under its own name with its own parts."""
    result = {"reward": 0.0}
    for one in rewards:
        try:
            value = one.function(answer)
            if inspect.iscoroutine(value):  # of a plain function that hands on what an asynchronous one returns
                value.close()
                raise ValueError(f"{one.name} is asynchronous, which combine does not take")
            score = as_score(value)
        except ColumnError as error:
            raise error.below(one.name) from error
        result["reward"] += one.weight * score.reward
        result[one.name] = score.reward
        result.update({f"{one.name}.{key}": value for key, value in score.parts.items()})
    return result


def _split_key(key: str) -> tuple[str, str | None]:
    module, colon, rest = key.rpartition(":")
    name, dot, argument = rest.partition(".")
    return module + colon + name, argument if dot else None
