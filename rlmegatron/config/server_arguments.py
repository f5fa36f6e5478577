"""The names of SGLang's server arguments, read from the source of the installed one, which takes seconds to import.

In: nothing. Out: names. Must never import sglang.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_SURELY_ONE = "model_path"


@cache
def server_argument_names() -> frozenset[str]:
    """The fields of `ServerArgs`; none where SGLang is not installed or keeps them somewhere else.

    They lie in `srt/arg_groups/fields/` (sglang 0.5.21), a class for each group; before, in `srt/server_args.py`.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return frozenset()
    source = Path(package.submodule_search_locations[0], "srt")
    files = (source / "server_args.py", *(source / "arg_groups" / "fields").glob("*.py"))
    names = frozenset(name for path in files if path.is_file() for name in _fields(path))
    return names if _SURELY_ONE in names else frozenset()


def _fields(path: Path) -> list[str]:
    """What the classes of a file declare with a type; private ones are no arguments."""
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    declared = [one.target for node in classes for one in node.body if isinstance(one, ast.AnnAssign)]
    return [target.id for target in declared if isinstance(target, ast.Name) and not target.id.startswith("_")]
