"""From a YAML file and dotted overrides to a `RunConfig`, and back to YAML.

In: a path and `section.key=value` strings. Out: the frozen config, or one `ConfigError` that carries every problem at
once. Must never import torch; rules that span sections live in `rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlmegatron.config import yaml_text
from rlmegatron.config.explain import dotted, explain, is_open_mapping
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.section import Section
from rlmegatron.config.wording import as_yaml
from rlmegatron.config.yaml_text import KeyPath

_COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """The user's configuration is wrong; `problems` holds a line per mistake, further ones indented."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in the YAML file `path`, with `section.key=value` overrides on top (the last one of a key wins).

    A value of an override is YAML; lists are replaced as a whole; keys that a section does not name keep its defaults.
    Paths inside the config are left as they are, so they are relative to the working directory. Raises ConfigError.
    """
    document = _read(path)
    problems = list(document.problems)
    given: Any = {} if document.value is None else document.value
    origins: dict[KeyPath, str] = {key: f"{path} line {line}" for key, line in document.lines.items()}
    if not isinstance(given, dict):
        raise ConfigError([*problems, f"{path}: holds {as_yaml(given)}; a config is a mapping of sections"])
    for override in overrides:
        problems += _apply(override, given, origins)
    if document.problems:
        raise ConfigError(problems)

    def origin(key: KeyPath) -> str:
        return next((origins[key[:end]] for end in range(len(key), 0, -1) if key[:end] in origins), str(path))

    infinite = {
        key: f"{dotted(key)}: {value} is not allowed; use a finite number ({origin(key)})"
        for key, value in _leaves(given, ())
        if isinstance(value, float) and not math.isfinite(value)
    }
    problems += infinite.values()
    filled = _fill(given)
    try:
        config = RunConfig.model_validate(filled)
    except ValidationError as error:
        said = tuple(f"{dotted(key)}: " for key in infinite)
        problems += [line for line in explain(error, given=filled, origin=origin) if not line.startswith(said)]
    if problems:
        raise ConfigError(problems)
    return config


def dump(cfg: RunConfig) -> str:
    """Every key of `cfg` as YAML; `load` gives the same config back."""
    return yaml_text.dump(cfg.model_dump())


def _read(path: str | Path) -> yaml_text.Document:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot read the config: {error.strerror}"]) from error
    return yaml_text.parse(text, source=str(path))


def _apply(override: str, given: dict[str, Any], origins: dict[KeyPath, str]) -> list[str]:
    """Write one `section.key=value` into `given`; returns what is wrong with it."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not all(name.split(".")):
        return [f"override '{override}': not of the form section.key=value ({_COMMAND_LINE})"]
    value = yaml_text.parse(text, source=f"override '{override}'")
    if value.problems:
        return value.problems
    path = _split(name)
    target: Any = given
    for depth, part in enumerate(path[:-1], start=1):
        if target.get(part) is None:
            target[part] = {}
            origins.setdefault(path[:depth], _COMMAND_LINE)
        target = target[part]
        if isinstance(target, list):
            whole = ".".join(path[:depth])
            return [f"{name}: {whole} is a list and is replaced as a whole: {whole}='[...]' ({_COMMAND_LINE})"]
        if not isinstance(target, dict):
            return [f"{name}: {'.'.join(path[:depth])} is not a section ({_COMMAND_LINE})"]
    target[path[-1]] = value.value
    for stale in [key for key in origins if key[: len(path)] == path]:
        del origins[stale]
    origins[path] = _COMMAND_LINE
    return []


def _split(name: str) -> tuple[str, ...]:
    """`name` at its dots, except inside a mapping with free keys: eval.sets.v1.2 sets the key 'v1.2'."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if is_open_mapping(tuple(parts[:depth])):
            return (*parts[:depth], ".".join(parts[depth:]))
    return tuple(parts)


def _fill(given: Any) -> Any:
    """A required section that is absent becomes empty, so that its missing keys are named."""
    if not isinstance(given, dict):
        return given
    required = [name for name, field in RunConfig.model_fields.items() if field.is_required() and _is_section(field)]
    return {**{name: {} for name in required}, **given}


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _leaves(below, (*path, index))
    else:
        yield path, value
