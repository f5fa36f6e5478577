"""Imports the module of a function of the user's own, 'package.module:function', wherever a configuration names one.

In: the name. Out: the module, or ValueError. Must never import torch itself; what the user's module imports is theirs.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
import traceback
from types import ModuleType

_INDENT = "    "
_OURS = (os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""), importlib.__file__)
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages()}
)


def import_own_module(name: str) -> ModuleType:
    """The module of 'package.module:function', found on sys.path and in the working directory.

    Raises ValueError with the reason and where in the user's code it lies, whatever that code raised; the caller puts
    the key of the configuration before it.
    """
    if refusal := file_refusal(name):
        raise ValueError(refusal)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = name.partition(":")[0]
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # SystemExit of a script without a main guard would end the run silently
        raise ValueError(f"cannot import {module!r} of {name!r}: {reason_of(error)}") from error


def file_refusal(name: str) -> str | None:
    """Why a name that gives a file is refused, and how it ought to be written; None where it gives none.

    >>> file_refusal("sub/my.py:score"), file_refusal("sub.my:score")
    ("'sub/my.py:score' is not allowed; name a module, not a file: sub.my:score", None)
    """
    meant = _module_of_file(name)
    return f"{name!r} is not allowed; name a module, not a file: {meant}" if meant else None


def _module_of_file(name: str) -> str | None:
    path, colon, function = name.partition(":")
    if "/" not in path and not path.endswith(".py"):
        return None
    path = os.path.expanduser(path.removesuffix(".py"))
    below = os.path.relpath(path)
    if below.startswith(os.pardir):
        folder, module = os.path.split(os.path.abspath(path))
        return f"{module}{colon}{function}, with {folder} on PYTHONPATH"
    return f"{below.replace(os.sep, '.')}{colon}{function}"


def reason_of(error: BaseException) -> str:
    """What the user's own code raised, and where: 'ValueError: boom (my.py line 3)'; further lines are indented."""
    first, *further = [line for line in str(error).splitlines() if line.strip()] or [""]
    said = f"{type(error).__name__}: {first.strip()}" if first else type(error).__name__
    place = _users_place(error)
    return "\n".join([f"{said} ({place})" if place else said, *(_INDENT + line for line in further)])


def _users_place(error: BaseException) -> str | None:
    """The last line of the user's own code that was run; None if none was, or if the message has a place already."""
    if isinstance(error, SyntaxError):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    ran = [one for one in frames if os.path.isabs(one.filename) and not one.filename.startswith(_OURS)]
    # What the user's file imports may fail far down in a library; the user's own package may be an installed one, too.
    own = [one for one in ran if not one.filename.startswith(_INSTALLED)] or ran
    if not own:
        return None
    filename, below = own[-1].filename, os.path.relpath(own[-1].filename)
    return f"{filename if below.startswith(os.pardir) else below} line {own[-1].lineno}"
