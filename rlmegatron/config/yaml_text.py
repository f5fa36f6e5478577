"""YAML as this project reads and writes it: YAML 1.2 scalars, no duplicate keys, and a line number for every key.

In: text. Out: plain Python values with the line of each, or the reverse. Must never import torch or know the schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from rlmegatron.config.wording import as_yaml

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the root to a value."""

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_SCALARS: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
)


_DEEPEST = 100
"""How deep values may be nested: far more than any config has, and less than would run out of stack."""
_MOST_VALUES = 100_000
"""How many values there may be: aliases of aliases, each a few characters long, stand for any number of them."""


@dataclass
class Document:
    """A parsed text: its value, the line of every key and list item, and what is wrong with it, one line each."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2, where 1e-6 is a number, 010 is ten and `on` is text."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        self._depth = 0
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As the class above, which would run out of stack on what is nested too deep."""
        if self._depth == _DEEPEST:
            raise ComposerError(None, None, f"nested more than {_DEEPEST} deep", self.peek_event().start_mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As the class above, which raises anything for text that its explicit tag does not fit, as in `!!bool x`."""
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, ValueError):
            tag, shown = node.tag.rpartition(":")[2], as_yaml(node.value)
            raise ConstructorError(None, None, f"{shown} cannot be read as !!{tag}", node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader of YAML 1.1 or 1.2 would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text, 10)


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML would fold Unicode's own line breaks as if they were '\n', and read '\n' back.
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Dumper.add_representer(str, _represent_str)


def parse(text: str, *, source: str) -> Document:
    """The document in `text`; `source` (a file name, say) opens every problem line. An empty text's value is None."""
    document = Document()
    try:
        loader = _Loader(text)
    except ReaderError as error:
        where = f"{_printable(source)} line {text.count(chr(10), 0, error.position) + 1}"
        document.problems.append(f"{where}: not valid YAML: the character U+{error.character:04X} is not allowed")
        return document
    try:
        node = loader.get_single_node()
        if node is None:
            return document
        _locate(node, (), document, source=source, above=())
        if not document.problems:
            document.value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source if mark is None else f"{source} line {mark.line + 1}"
        document.problems.append(f"{where}: not valid YAML: {error.problem or error.context}")
    except (yaml.YAMLError, ValueError) as error:
        document.problems.append(f"{source}: not valid YAML: {error}")
    finally:
        loader.dispose()
    return document


def dump(value: Mapping[str, Any]) -> str:
    """Block-style YAML of plain values, keys in the order given; `parse` reads the same values back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _no_key(node: yaml.Node) -> str:
    """Why `node`, which is not text, is no key."""
    if isinstance(node, yaml.ScalarNode):
        return f"the key {node.value} is not text; put it in quotes"
    kind = "mapping" if isinstance(node, yaml.MappingNode) else "list"
    return f"a {kind} stands where a key or text should; put text that begins with a brace or bracket in quotes"


def _locate(node: yaml.Node, path: KeyPath, document: Document, *, source: str, above: tuple[int, ...]) -> None:
    """Enter the lines of everything below `node`, and report keys that are repeated or are not text."""
    if id(node) in above:
        document.problems.append(f"{source} line {node.start_mark.line + 1}: an alias stands inside its own anchor")
        return
    if len(above) == _DEEPEST:
        raise ComposerError(None, None, f"nested more than {_DEEPEST} deep", node.start_mark)
    if len(document.lines) > _MOST_VALUES:
        raise ComposerError(None, None, f"its aliases stand for more than {_MOST_VALUES} values", node.start_mark)
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[(*path, index)] = item.start_mark.line + 1
            _locate(item, (*path, index), document, source=source, above=above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if key_node.tag != "tag:yaml.org,2002:str":
            document.problems.append(f"{source} line {line}: {_no_key(key_node)}")
            continue
        key = str(key_node.value)
        name = ".".join(str(part) for part in (*path, key))
        if key in seen:
            document.problems.append(f"{name}: given twice, on lines {seen[key]} and {line}; keep one ({source})")
            continue
        seen[key] = line
        document.lines[(*path, key)] = line
        _locate(value_node, (*path, key), document, source=source, above=above)
