"""The files and directories a config names, looked at before anything is started.

In: the config. Out: one line per file that is missing or unusable. Must never import torch, nor create anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from rlmegatron.config.file_names import JSON_LINES_SUFFIXES, WHOLE_CHECKPOINT, suffix_of
from rlmegatron.config.schema import RunConfig


def path_problems(cfg: RunConfig) -> list[str]:
    """Every data file that cannot be read and whatever keeps the run directory from being written, one line each."""
    found: list[str] = []
    for index, source in enumerate(cfg.data.train):
        found += _data_file(source.path, f"data.train[{index}].path", prompt_key=cfg.data.prompt_key)
    for name, path in cfg.eval.sets.items():
        found += _data_file(path, f"eval.sets.{name}", prompt_key=cfg.data.prompt_key)
    return [*found, *_run_directory(cfg)]


def _data_file(name: str, key: str, *, prompt_key: str) -> Iterator[str]:
    path = Path(name)
    try:
        suffix = suffix_of(name)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if not path.is_file():
        what = "is a directory" if path.is_dir() else f"does not exist (looked in {Path.cwd()})"
        yield f"{key}: {name} {what}; use a file"
    elif not os.access(path, os.R_OK):
        yield f"{key}: {name} is not readable"
    elif path.stat().st_size == 0:
        yield f"{key}: {name} is empty"
    elif suffix in JSON_LINES_SUFFIXES:
        yield from _first_row(path, prompt_key)


def _first_row(path: Path, prompt_key: str) -> Iterator[str]:
    """The first row alone: a wrong data.prompt_key shows there, before models are loaded."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            number, line = next(((n, line) for n, line in enumerate(file, start=1) if line.strip()), (1, ""))
        row = json.loads(line)
    except ValueError as error:
        yield f"{path}{f' line {number}' if number else ''}: not a JSON object: {error}"
        return
    if not isinstance(row, dict):
        yield f"{path} line {number}: holds {type(row).__name__}, not a JSON object"
    elif prompt_key not in row:
        has = ", ".join(f"'{column}'" for column in row) or "nothing"
        yield f"{path} line {number}: no field '{prompt_key}'; it has {has} (set data.prompt_key)"


def _run_directory(cfg: RunConfig) -> Iterator[str]:
    key = "run_dir" if cfg.run_dir is not None else "name"
    directory = Path(cfg.directory)
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        what = "is a file" if existing == directory else f"cannot be made, because {existing} is a file"
        yield f"{key}: the run directory {directory} {what}; use a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{key}: the run directory {directory} cannot be written ({existing} is not writable)"
    elif cfg.train.resume == "never" and (name := _whole_checkpoint(directory / "checkpoints")):
        yield (
            f"train.resume: 'never', but {directory / 'checkpoints'} holds {name}; use another name or run_dir, or "
            "train.resume=auto"
        )


def _whole_checkpoint(checkpoints: Path) -> str | None:
    """The name of some whole checkpoint."""
    names = [entry.name for entry in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return next((name for name in sorted(names) if WHOLE_CHECKPOINT.fullmatch(name)), None)
