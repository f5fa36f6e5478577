"""The texts of a run on disk: rollouts/ and eval/ as JSONL, one answer a line.

In: judged groups. Out: files that appear whole. Must never communicate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rlmegatron.types import SampleGroup


def write_samples(path: Path, groups: Sequence[SampleGroup], *, step: int, limit: int | None = None) -> None:
    """Write up to `limit` answers in the order of `groups`."""
    lines = [line for group in groups for line in _lines(group, step)][:limit]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(partial, path)


def _lines(group: SampleGroup, step: int) -> list[str]:
    return [
        json.dumps(
            {
                "step": step,
                "prompt_id": group.prompt.id,
                "sample": sample.index,
                "source": group.prompt.source,
                "prompt": group.prompt.text,
                "response": sample.text,
                "reward": sample.reward,
                "reward_parts": dict(sample.reward_parts),
                "finish_reason": sample.finish_reason,
                "num_tokens": len(sample.token_ids),
                "weight_version": max(sample.weight_versions, default=None),
            },
            ensure_ascii=False,
        )
        for sample in group.samples
    ]
