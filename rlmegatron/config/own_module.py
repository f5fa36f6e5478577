"""Imports the module of a function of the user's own, 'package.module:function', wherever a configuration names one.

In: the name. Out: the module, or ValueError. Must never import torch itself; what the user's module imports is theirs.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def import_own_module(name: str) -> ModuleType:
    """The module of 'package.module:function', found on sys.path and in the working directory.

    Raises ValueError with the reason, whatever its code raised; the caller puts the key of the configuration before it.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = name.partition(":")[0]
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # SystemExit of a script without a main guard would end the run silently
        raise ValueError(f"cannot import {module!r} of {name!r}: {type(error).__name__}: {error}") from error
