"""Whether a model directory is whole: its weights, of one kind, and the files of a tokenizer.

In: a directory. Out: one line for everything that is missing or broken. Must never import torch, megatron or
transformers, nor look at values of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlmegatron.models.model_files import (
    COMMON_FILE,
    DATA_SUFFIX,
    INDEX_FILE,
    MEGATRON_CONFIG_FILE,
    METADATA_FILE,
    SINGLE_FILE,
    holds_megatron_checkpoint,
    read_object,
)
from rlmegatron.models.safetensors_header import read_header

_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_MEGATRON_SHARDS = f"*{DATA_SUFFIX}"
_MEGATRON_FILES = (METADATA_FILE, MEGATRON_CONFIG_FILE, COMMON_FILE)


def weight_problems(directory: Path) -> list[str]:
    """Why no weights can be read; headers of safetensors are read whole, values are not looked at."""
    has_safetensors = (directory / INDEX_FILE).is_file() or (directory / SINGLE_FILE).is_file()
    if holds_megatron_checkpoint(directory):
        if has_safetensors:
            return [f"{directory} holds both safetensors and a Megatron checkpoint; use a directory with one of them"]
        return _megatron_problems(directory)
    if not has_safetensors:
        found = " (there is a pytorch_model*.bin: convert it to safetensors)" if list(directory.glob("*.bin")) else ""
        return [f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}, nor a Megatron checkpoint (.metadata){found}"]
    if not (directory / INDEX_FILE).is_file():
        return _shard_problems([directory / SINGLE_FILE])
    try:
        shards = read_object(directory / INDEX_FILE).get("weight_map")
    except ValueError as error:
        return [str(error)]
    if not isinstance(shards, dict) or not shards:
        return [f"{directory / INDEX_FILE} has no weight_map"]
    return _shard_problems(directory / name for name in sorted({str(name) for name in shards.values()}))


def _megatron_problems(directory: Path) -> list[str]:
    """A dist-checkpoint is begun with its shards; the files that describe them come last."""
    missing = [name for name in _MEGATRON_FILES if not (directory / name).is_file()]
    if not any(True for _ in directory.glob(_MEGATRON_SHARDS)):
        missing.append(_MEGATRON_SHARDS)
    if not missing:
        return []
    return [
        f"{directory} holds an unfinished Megatron checkpoint (no {', '.join(missing)}): what wrote it was "
        "interrupted; convert again"
    ]


def _shard_problems(paths: Iterable[Path]) -> list[str]:
    return [problem for path in paths if (problem := _shard_problem(path))]


def _shard_problem(path: Path) -> str | None:
    try:
        if not path.is_file():
            return f"{path} is missing, though the index names it"
        read_header(path)
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def has_tokenizer(path: str | Path) -> bool:
    """Whether a directory has the files that a tokenizer is read from."""
    return any(all((Path(path) / name).is_file() for name in names) for names in _TOKENIZER_FILES)


def tokenizer_problems(directory: Path) -> list[str]:
    """Why no tokenizer can be read."""
    if has_tokenizer(directory):
        return []
    looked_for = ", nor ".join(" with ".join(names) for names in _TOKENIZER_FILES)
    return [f"{directory} has no tokenizer: neither {looked_for}"]
