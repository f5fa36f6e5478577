"""The files and directories a config names, looked at before anything is started.

In: the config. Out: one line per file that is missing or unusable. Must never import torch, nor create anything, nor
read what files hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlmegatron.config.file_names import WHOLE_CHECKPOINT, suffix_of
from rlmegatron.config.schema import RunConfig


def path_problems(cfg: RunConfig) -> list[str]:
    """Every data file that cannot be read and whatever keeps the run directory from being written, one line each."""
    files = [problem for key, name in _data_files(cfg) for problem in _data_file(name, key)]
    return [*files, *_run_directory(cfg)]


def usable_data_files(cfg: RunConfig) -> list[str]:
    """The data files of which `path_problems` says nothing, each once: what their rows hold is the reader's to say."""
    return list(dict.fromkeys(name for key, name in _data_files(cfg) if not _data_file(name, key)))


def _data_files(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Key of the config and path."""
    yield from ((f"data.train[{index}].path", source.path) for index, source in enumerate(cfg.data.train))
    yield from ((f"eval.sets.{name}", path) for name, path in cfg.eval.sets.items())


def _data_file(name: str, key: str) -> list[str]:
    return _looked_at(_data_file_problems(name, key), key=key, what=name)


def _run_directory(cfg: RunConfig) -> list[str]:
    key = "run_dir" if cfg.run_dir is not None else "name"
    return _looked_at(_run_directory_problems(cfg, key), key=key, what=f"the run directory {cfg.directory}")


def _looked_at(problems: Iterator[str], *, key: str, what: str) -> list[str]:
    """`problems`, or the one that keeps them from being found, such as a directory that may not be entered."""
    try:
        return list(problems)
    except OSError as error:
        return [f"{key}: {what} cannot be looked at: {error.strerror}"]


def _data_file_problems(name: str, key: str) -> Iterator[str]:
    path = Path(name)
    try:
        suffix_of(name)
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


def _run_directory_problems(cfg: RunConfig, key: str) -> Iterator[str]:
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
