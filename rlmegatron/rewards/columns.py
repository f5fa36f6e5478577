"""Whether rewards of the table find in a data row what they judge by, known before an answer is generated.

In: a reward that `resolve` took, and rows by where they stand. Out: one line per row and reward that could not judge.
Must never import torch or call a function of the user's own, which reads what it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmegatron.rewards.api import Answer, ColumnError
from rlmegatron.rewards.combine import split_parts
from rlmegatron.rewards.signature import Scalar
from rlmegatron.rewards.table import COMBINE, REWARDS


def column_problems(
    name: str, args: Mapping[str, Scalar], rows: Mapping[str, Mapping[str, Any]], *, stops_at_error: bool
) -> list[str]:
    """Columns that rewards of the table, those that `combine` adds up too, do not find in `rows`.

    rows: by 'data/train.jsonl line 1'. stops_at_error: whether a failed judgement ends the run (reward.on_error); then
    what a column holds is looked at too, for otherwise a row without a usable reference is allowed.
    """
    parts = [(part.name, part.args) for part in split_parts(args)] if name == COMBINE else [(name, args)]
    # What may take for ever is not called here; the one such reward of the table, regex, reads no column.
    judged = [(part, own) for part, own in parts if part in REWARDS and REWARDS[part].is_linear]
    found: list[str] = []
    for where, row in rows.items():
        for part, own in judged:
            error = _trial(part, own, row)
            if isinstance(error, ColumnError):
                found.append(f"{where}: {error.below(part) if name == COMBINE else error}")
            elif error is not None and stops_at_error:
                found.append(f"{where}: {error}")
    return found


def _trial(name: str, args: Mapping[str, Scalar], row: Mapping[str, Any]) -> ValueError | None:
    """What judging an answer without a single token fails of: an answer has no part in whether it can be judged."""
    try:
        REWARDS[name].function(Answer(prompt="", response="", token_ids=(), finish_reason="stop", row=row), **args)
    except ValueError as error:
        return error
    return None
