"""Turns what the schema refuses into one line each: where, what was given, what is allowed.

In: pydantic's errors and the values given. Out: text. Must never import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError

from rlmegatron.config.other_libraries import key_elsewhere, ours_of
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.wording import as_yaml, listed, nearest
from rlmegatron.config.yaml_text import KeyPath

_NUM_ELSEWHERE = 3
_SURELY_OURS = 0.85
"""How alike a key of ours must be to what was given for another library's key of that name not to be meant."""
_MOST_SIBLINGS = 10
"""Keys of a section that are listed besides the one that was probably meant."""


def explain(error: ValidationError, *, given: Any, origin: Callable[[KeyPath], str]) -> list[str]:
    """One line per refused value; `origin` says where a path was set, as in 'run.yaml line 3'."""
    problems: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        found = _path_in(item["loc"], given=given, missing=item["type"] == "missing")
        kind = item["type"] if found == item["loc"] else "value"
        for path in _keys_meant(found, item["input"]) if kind == "extra_forbidden" else [found]:
            if path not in problems:
                where = origin(path)
                problems[path] = _problem(kind, path, item["input"]) + (f" ({where})" if where else "")
    # A list whose items are all refused is also called too short: the items say it better.
    return [text for path, text in problems.items() if not any(_is_below(other, path) for other in problems)]


def dotted(path: KeyPath) -> str:
    """`('data', 'train', 0, 'path')` as data.train[0].path."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def is_open_mapping(path: KeyPath) -> bool:
    """Whether the value at `path` takes keys of the user's choice, as rollout.engine_args does."""
    node = _node(path)
    return node is not None and isinstance(node.get("additionalProperties"), dict)


def allowed(path: KeyPath) -> str:
    """What the schema accepts at `path`, in words."""
    node = _node(path)
    assert node is not None, f"no schema for {dotted(path)}"
    return _describe(node)


def _problem(kind: str, path: KeyPath, value: Any) -> str:
    if kind == "extra_forbidden":
        return f"{dotted(path)}: unknown key; {_nearest(path)}"
    if kind == "missing":
        node = _node(path)
        assert node is not None, f"no schema for {dotted(path)}"
        about = f": {node['description']}" if "description" in node else ""
        return f"{dotted(path)}: missing; give {_describe(node)}{about}"
    shown = "an empty section" if value is None and _is_section(path) else as_yaml(value)
    return f"{dotted(path)}: {shown} is not allowed; use {allowed(path)}"


def _is_below(path: KeyPath, top: KeyPath) -> bool:
    return len(path) > len(top) and path[: len(top)] == top


def _path_in(loc: tuple[str | int, ...], *, given: Any, missing: bool) -> KeyPath:
    """`loc` without the branch names that pydantic appends for unions, which are no part of the input."""
    value: Any = given
    for depth, part in enumerate(loc):
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return loc[: depth + 1] if missing and isinstance(value, dict) else loc[:depth]
    return loc


def _keys_meant(path: KeyPath, value: Any) -> list[KeyPath]:
    """An unknown key; every key in it, if it is a section of another library that holds keys with a name here."""
    below = list(_leaves(path, value))
    return below if any(key_elsewhere(str(leaf[-1])) for leaf in below) else [path]


def _leaves(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves((*path, key), below)
    else:
        yield path


def _nearest(path: KeyPath) -> str:
    key, parent = str(path[-1]), path[:-1]
    while _node(parent) is None:
        parent = parent[:-1]
    siblings = list(_properties(_node(parent)))
    known = list(_all_paths())
    if key in {dotted(other) for other in known}:
        section, _, name = key.rpartition(".")
        return f"write '{name}' indented below '{section}:'"
    others = f"{dotted(parent) or 'the file'} has {', '.join(siblings)}"
    besides = f" {others}" if len(siblings) <= _MOST_SIBLINGS else ""
    close = nearest(key, siblings)
    if not (close and _is_nearer(close, key, parent)) and (
        elsewhere := key_elsewhere(key, sections=[str(part) for part in path[:-1]])
    ):
        return elsewhere
    if close:
        return f"did you mean {dotted((*parent, close))}?{besides}"
    by_name: dict[str, list[str]] = {}
    for other in known:
        by_name.setdefault(str(other[-1]), []).append(dotted(other))
    if close := nearest(key, by_name, cutoff=0.75):
        return f"did you mean {' or '.join(by_name[close][:_NUM_ELSEWHERE])}?{besides}"
    return others


def _is_nearer(close: str, key: str, parent: KeyPath) -> bool:
    """Whether `close`, a key below `parent`, is meant rather than what another library means by `key`.

    That is so where they are all but equal, and where another section has what the library means by the same name, as
    the longest answer of an evaluation and that of training.
    """
    theirs = {name.rpartition(".")[2] for name in ours_of(key) if name != dotted((*parent, close))}
    return close in theirs or nearest(key, [close], cutoff=_SURELY_OURS) is not None


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def _resolve(node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    target = _schema()["$defs"][node["$ref"].rpartition("/")[2]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _properties(node: dict[str, Any] | None) -> dict[str, Any]:
    return {} if node is None else node.get("properties", {})


def _node(path: KeyPath) -> dict[str, Any] | None:
    """The schema of the value at `path`; None if there is none."""
    node = _resolve(_schema())
    for part in path:
        fixed = node.get("prefixItems", [])
        if isinstance(part, int):
            below = fixed[part] if part < len(fixed) else node.get("items")
        else:
            below = _properties(node).get(part, node.get("additionalProperties"))
        if not isinstance(below, dict):
            return None
        node = _resolve(below)
    return node


def _is_section(path: KeyPath) -> bool:
    return bool(_properties(_node(path)))


def _all_paths() -> Iterator[KeyPath]:
    """Every section and field of the schema, outside lists."""
    waiting: list[KeyPath] = [()]
    while waiting:
        path = waiting.pop(0)
        below = [(*path, name) for name in _properties(_node(path))]
        yield from below
        waiting.extend(below)


def _describe(node: dict[str, Any]) -> str:
    return listed(list(_options(node)))


def _options(node: dict[str, Any]) -> Iterator[str]:
    """What may stand there, one by one: a choice or a switch that may also be null gives three in one row."""
    node = _resolve(node)
    if "anyOf" in node:
        for option in node["anyOf"]:
            yield from _options(option)
    elif "enum" in node:
        yield from map(as_yaml, node["enum"])
    elif node["type"] == "boolean":
        yield from ("true", "false")
    else:
        yield _describe_one(node)


def _describe_one(node: dict[str, Any]) -> str:
    kind = node["type"]
    if kind == "array":
        return _describe_list(node)
    if kind == "object":
        if below := node.get("properties"):
            return f"a section with keys from {', '.join(below)}"
        return f"a mapping from names to {_describe(node['additionalProperties'])}"
    if kind == "string":
        return f"text that matches {node['pattern']}" if "pattern" in node else "text"
    words = {"integer": "a whole number", "number": "a number", "null": "null"}
    return words[kind] + _bounds(node)


def _describe_list(node: dict[str, Any]) -> str:
    if fixed := node.get("prefixItems"):
        return f"a list of {len(fixed)}: " + ", ".join(_describe(item) for item in fixed)
    at_least = f"at least {node['minItems']} of: " if "minItems" in node else ""
    return f"a list of {at_least}{_describe(node['items'])}"


def _bounds(node: dict[str, Any]) -> str:
    words = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    parts = [f"{word} {node[key]:g}" for key, word in words.items() if key in node]
    text = " and ".join(parts)
    return f" of {text}" if text.startswith("at") else f" {text}" if text else ""
