"""The checkpoints/ directory of a run: which ones are whole, which is the newest, which are old enough to go.

In: a path. Out: step directories. A checkpoint is written under a `.partial` name and renamed when it is whole, so a
directory with a plain name is always complete. Must never import torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlmegatron.config.file_names import WHOLE_CHECKPOINT

STATE_FILE = "state.json"


class CheckpointDirectory:
    """Called on rank 0 alone, but for `partial` and `of`, which only name paths."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path, self.keep = path, keep

    def of(self, step: int) -> Path:
        """Where the whole checkpoint of `step` is or will be."""
        return self.path / f"step_{step:06d}"

    def partial(self, step: int) -> Path:
        """Where it is written."""
        return self.path / f"step_{step:06d}.partial"

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        found = (WHOLE_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return max(self.steps(), default=None)

    def open(self, step: int) -> None:
        """An empty partial directory, whatever a stopped run has left there."""
        shutil.rmtree(self.partial(step), ignore_errors=True)
        self.partial(step).mkdir(parents=True)

    def seal(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the plain state, give the directory its name, and delete what is older than the newest `keep`."""
        (self.partial(step) / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")
        shutil.rmtree(self.of(step), ignore_errors=True)
        self.partial(step).rename(self.of(step))
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.of(old))

    def check(self, step: int, *, trains: Iterable[str], **wanted: object) -> None:
        """Raise ValueError unless a run that trains `trains` under the settings `wanted` can go on from `step`."""
        state = self.state(step)
        for key, now in wanted.items():
            if state.get(key) != now:
                raise ValueError(f"{self.of(step)} was saved with {key} {state.get(key)}, the configuration says {now}")
        missing = set(trains) - set(state["optimizer_steps"])
        if missing:
            raise ValueError(f"{self.of(step)} has no {', '.join(sorted(missing))}; it was saved by another algorithm")

    def state(self, step: int) -> dict[str, Any]:
        """The plain state of a whole checkpoint; ValueError names a file that cannot be read."""
        path = self.of(step) / STATE_FILE
        try:
            state = json.loads(path.read_text())
            if not isinstance(state, dict):
                raise ValueError(f"it holds a {type(state).__name__} in place of an object")
            return state
        except (OSError, ValueError) as error:  # text that is no JSON or no UTF-8 is a ValueError
            raise ValueError(
                f"{path}: cannot be read ({error}); delete {self.of(step)} to resume from an older one"
            ) from None
