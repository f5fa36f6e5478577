"""What a reward sees and what it returns: the `Answer` record and the two outcomes of judging one.

In: a prompt and one sample of it. Out: an `Answer` for the reward function, and its return value as a checked `Score`.
Must never import torch or any package of ours but `types`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlmegatron.types import FinishReason, Prompt, Sample

RewardValue = float | Mapping[str, float]
RewardFunction = Callable[..., RewardValue | Awaitable[RewardValue]]
"""`reward(answer: Answer, **args)`: a number, or a mapping with 'reward' (the total) and further parts to log."""

RESERVED_PART = "error"
"""Part under which the judge counts failed judgements; a reward may not return it."""


class RewardError(RuntimeError):
    """Judging failed; the message names the sample, or the reward's process if no sample is to blame."""

    expected = True
    """The message says it all: a report needs no traceback of ours."""


class ColumnError(ValueError):
    """The row has no such column as an argument of the reward names."""

    def __init__(self, complaint: str, argument: str) -> None:
        super().__init__(f"{complaint} (set reward.args.{argument})")
        self.complaint, self.argument = complaint, argument

    def below(self, part: str) -> ColumnError:
        """The same of a part of `combine`, whose arguments have its name before theirs."""
        return ColumnError(self.complaint, f"{part}.{self.argument}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as a reward function sees it."""

    prompt: str
    """Text of the prompt as the model read it, template included."""
    response: str
    """Text of the answer."""
    token_ids: tuple[int, ...]
    """Tokens of the answer; the last one is an EOS when `finish_reason` is "stop"."""
    finish_reason: FinishReason
    """Why generation ended: "stop" (EOS), "length" (cut off) or "abort"."""
    row: Mapping[str, Any]
    """The data row that the prompt came from, every column of it."""

    @classmethod
    def of(cls, prompt: Prompt, sample: Sample) -> Answer:
        """The answer that `sample` gives to `prompt`."""
        return cls(prompt.text, sample.text, sample.token_ids, sample.finish_reason, prompt.row)

    def column(self, key: str, *, argument: str = "answer_key") -> Any:
        """Value of one column of the row, or of a part of a nested one: 'reward_model.ground_truth'.

        A column of that very name goes first. `argument` is the reward argument that names it, for the error message.
        Raises ColumnError that says what is there instead.
        """
        if key in self.row:
            return self.row[key]
        value: Any = self.row
        names = key.split(".")
        for depth, name in enumerate(names):
            if not isinstance(value, Mapping) or name not in value:
                raise ColumnError(_absence(names, depth, value), argument)
            value = value[name]
        return value


@dataclass(frozen=True, slots=True)
class Score:
    """A judgement: the total, and the parts that are only logged."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A judgement that did not come about; `reason` is one line and may be followed by a traceback."""

    reason: str


def as_score(value: object) -> Score:
    """The return value of a reward function as a `Score`; raises ValueError for anything but finite numbers."""
    if not isinstance(value, Mapping):
        return Score(_number(value, what="the reward"))
    if "reward" not in value:
        raise ValueError(f"the reward returned a mapping without 'reward' (the total): {sorted(map(str, value))}")
    if RESERVED_PART in value:
        raise ValueError(f"the reward returned a part named {RESERVED_PART!r}, a name that counts failed judgements")
    parts = {str(key): _number(part, what=f"part {key!r}") for key, part in value.items()}
    return Score(parts.pop("reward"), parts)


def _absence(names: list[str], depth: int, value: Any) -> str:
    """That `value`, which the names before `depth` led to, does not have the one at it."""
    missing, key = names[depth], ".".join(names)
    if not isinstance(value, Mapping):
        found = f"it is {value!r:.60}"
    else:
        found = f"it has {', '.join(map(repr, value)) or 'nothing'}"
    if depth:
        return f"column {'.'.join(names[:depth])!r} of the row has no {missing!r}; {found}"
    return f"the row has no column {missing!r}{f' of {key!r}' if missing != key else ''}; {found}"


def _number(value: object, *, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{what} is {value!r:.80} of type {type(value).__name__}, must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}, must be a finite number")
    return float(value)
