"""Owns importing the packages that only some sinks need.

In: a module's name; out: the module, or one error that says which setting asked for it and how to install it. Must
never import any of them at its top.
"""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, *, package: str, setting: str) -> Any:
    """Import `module`, which pip calls `package`; raises ValueError that names the `setting` when it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{setting} needs the package {package!r}, which is not installed ({error}): "
            f"run 'pip install {package}', or turn {setting} off"
        ) from error
