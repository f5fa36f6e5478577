"""Turns what the schema refuses into one line each: where, what was given, what is allowed.

In: pydantic's errors and the values given. Out: text. Must never import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError

from rlmegatron.config.other_libraries import (
    answer_by_sections,
    is_absent,
    key_elsewhere,
    keys_elsewhere,
    ours_of,
    within,
)
from rlmegatron.config.schema import RunConfig
from rlmegatron.config.wording import as_yaml, listed, nearest, plain
from rlmegatron.config.yaml_text import KeyPath

_NUM_ELSEWHERE = 3
_SURELY_OURS = 0.85
"""How alike a key of ours must be to what was given for another library's key of that name not to be meant."""
_CLOSE = 0.6
"""How alike a key of the same section must be to what was given."""
_CLOSE_ELSEWHERE = 0.75
"""How alike a key of another section must be to what was given."""
_MOST_SIBLINGS = 10
"""Keys of a section that are listed besides the one that was probably meant."""


def explain(error: ValidationError, *, given: Any, origin: Callable[[KeyPath], str]) -> list[str]:
    """One line per refused value; `origin` says where a path was set, as in 'run.yaml line 3'."""
    problems: dict[KeyPath, str] = {}
    unknown: set[KeyPath] = set()
    for item in error.errors(include_url=False):
        found = _path_in(item["loc"], given=given, missing=item["type"] == "missing")
        kind = item["type"] if found == item["loc"] else "value"
        paths = _keys_meant(found, item["input"]) if kind == "extra_forbidden" else [found]
        unknown.update(paths if kind == "extra_forbidden" else ())
        for path in paths:
            if path not in problems:
                where = origin(path)
                problems[path] = _problem(kind, path, item["input"]) + (f" ({where})" if where else "")
    # A list whose items are all refused is also called too short: the items say it better.
    return [
        text
        for path, text in problems.items()
        if path in unknown or not any(_is_below(other, path) for other in problems)
    ]


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
    """An unknown key; if it is a section of another library, what in it and around it has a name here."""
    below = list(_foreign_keys(path, value, is_below_named=False))
    return below if any(_name_here(one) or _ends_as_ours(one) for one in below) else [path]


def _ends_as_ours(path: KeyPath) -> bool:
    """Whether `path` is one of ours below a section that only theirs has, as actor_rollout_ref.model.path."""
    return len(path) > 2 and _node(path[-2:]) is not None


def _foreign_keys(path: KeyPath, value: Any, *, is_below_named: bool) -> Iterator[KeyPath]:
    """Sections that have a name here, and keys; below such a section, which says enough, only keys that have one."""
    is_named = _name_here(path) is not None
    if is_absent(str(path[-1]), sections=_sections(path)):
        yield path
    elif isinstance(value, dict) and value:
        if is_named:
            yield path
        for key, below in value.items():
            yield from _foreign_keys((*path, key), below, is_below_named=is_below_named or is_named)
    elif is_named or not is_below_named:
        yield path


def _name_here(path: KeyPath) -> str | None:
    """What the key of another library at `path` is here, by its own name or by that of a section around it."""
    key = str(path[-1])
    if elsewhere := key_elsewhere(key, sections=_sections(path)):
        return elsewhere
    home = _home(path)
    close = None if home is None else nearest(key, _properties(_node(home)))
    if home is None or close is None:
        return None
    name = dotted((*home, close))
    return f"here it is {name}" if plain(close) == plain(key) else f"did you mean {name}?"


def _home(path: KeyPath) -> KeyPath | None:
    """The section of ours that the innermost section around `path` is that has a name here."""
    for end in range(len(path) - 1, len(_own_section(path)), -1):
        if ours := keys_elsewhere(str(path[end - 1]), sections=_sections(path[:end])):
            home: KeyPath = tuple(ours[0].split("."))
            for part in path[end:-1]:
                home = (*home, part) if _is_section((*home, part)) else home
            return home if len(ours) == 1 and _is_section(home) else None
    return None


def _nearest(path: KeyPath) -> str:
    key, parent = str(path[-1]), _own_section(path)
    if answer := answer_by_sections(key, sections=_sections(path)):
        return answer
    by_name: dict[str, list[str]] = {}
    for other in _all_paths():
        by_name.setdefault(str(other[-1]), []).append(dotted(other))
    if "." in key and any(key in names for names in by_name.values()):
        section, _, name = key.rpartition(".")
        return f"write '{name}' indented below '{section}:'"
    siblings = list(_properties(_node(parent)))
    others = f"{dotted(parent) or 'the file'} has {', '.join(siblings)}"
    besides = f" {others}" if len(siblings) <= _MOST_SIBLINGS else ""
    top = [name for name, names in by_name.items() if name in names]
    close = _spelt_like(key, siblings, short=top, cutoff=_CLOSE)
    far = _spelt_like(key, by_name, short=top, cutoff=_CLOSE_ELSEWHERE)
    if not (close and _is_nearer(close, key, parent)) and (here := _name_here(path)):
        return here
    is_sibling = close is not None and plain(close) == plain(key) and parent == path[:-1]
    if far and plain(far) == plain(key) and not is_sibling:
        names = within(_sections(path), by_name[far])
        outer = next((name for name in names if "." not in name), None)
        return f"write '{outer}' at the top of the file" if outer else _question(names) + besides
    if close:
        return f"did you mean {dotted((*parent, close))}?{besides}"
    if far:
        return _question(within(_sections(path), by_name[far])) + besides
    return others


def _spelt_like(key: str, names: Collection[str], *, short: Collection[str], cutoff: float) -> str | None:
    """The nearest of `names`; those in `short`, which many a word is spelt like, only with a slip of the hand."""
    slips = {name for name in short if sorted(name) == sorted(key) or nearest(key, [name], cutoff=_SURELY_OURS)}
    return nearest(key, [name for name in names if name not in short or name in slips], cutoff=cutoff)


def _question(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names[:_NUM_ELSEWHERE])}?"


def _sections(path: KeyPath) -> list[str]:
    return [str(part) for part in path[:-1]]


def _own_section(path: KeyPath) -> KeyPath:
    """The innermost section around `path` that the schema has."""
    return next(path[:end] for end in range(len(path) - 1, -1, -1) if _node(path[:end]) is not None)


def _is_nearer(close: str, key: str, parent: KeyPath) -> bool:
    """Whether `close`, a key below `parent`, is meant rather than what another library means by `key`.

    That is so where they are all but equal, and where another section has what the library means by the same name, as
    the longest answer of an evaluation and that of training; but not where what the library means lies below `parent`,
    too, as the warmup of the critic's optimizer.
    """
    theirs = [name for name in ours_of(key) if name != dotted((*parent, close))]
    if any(name.startswith(f"{dotted(parent)}.") for name in theirs):
        return False
    return (
        close in {name.rpartition(".")[2] for name in theirs} or nearest(key, [close], cutoff=_SURELY_OURS) is not None
    )


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
        below = next(filter(None, (_below(option, part) for option in _alternatives(node))), None)
        if below is None:
            return None
        node = below
    return node


def _alternatives(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas of which a value at `node` fits one, as of a list that may also be null."""
    yield from map(_resolve, node["anyOf"]) if "anyOf" in node else [node]


def _below(node: dict[str, Any], part: str | int) -> dict[str, Any] | None:
    """The schema of an item or key of a value at `node`; None if there is none."""
    fixed = node.get("prefixItems", [])
    if isinstance(part, int):
        below = fixed[part] if part < len(fixed) else node.get("items")
    else:
        below = _properties(node).get(part, node.get("additionalProperties"))
    return _resolve(below) if isinstance(below, dict) else None


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
