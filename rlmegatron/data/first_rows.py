"""The first row of every data file, looked at before anything is started: most mistakes show in it.

In: paths. Out: those rows by where they stand, and a line for each that no run could read. Must never import torch, a
tokenizer or numpy: the check of a config does this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlmegatron.data.source import first_row, prompt_of
from rlmegatron.data.template import only_text


def first_rows(
    paths: Iterable[str], *, prompt_key: str, chat_template: bool = True
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """First rows by 'data/train.jsonl line 1', and why a file cannot be read or its row has no prompt, a line each.

    chat_template: data.chat_template; without it a list of messages is no prompt. A row without a prompt is returned
    too, for its other columns can be looked at all the same.
    """
    rows: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for path in paths:
        try:
            where, row = first_row(path)
            rows[where] = row
            prompt = prompt_of(row, key=prompt_key, where=where)
            if not chat_template:
                only_text(prompt, where=where)
        except ValueError as error:
            problems.append(str(error))
    return rows, problems
