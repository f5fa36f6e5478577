"""Owns the packages that only some sinks need: importing them, and saying beforehand which are missing.

In: a module's name, or the logging section; out: the module, or an error that says which setting asked for it and how
to install it. Must never import any of them at its top.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from rlmegatron.config.schema import LoggingConfig


def missing_packages(logging: LoggingConfig) -> list[str]:
    """One line for each sink that is asked for and whose package is not installed; imports none of them."""
    wanted = {
        "wandb": ("logging.wandb_project", logging.wandb_project is not None),
        "mlflow": ("logging.mlflow_uri", logging.mlflow_uri is not None),
        "tensorboard": ("logging.tensorboard", logging.tensorboard),
    }
    return [
        _missing(package, setting=setting)
        for package, (setting, is_wanted) in wanted.items()
        if is_wanted and not _is_installed(package)
    ]


def require(module: str, *, package: str, setting: str) -> Any:
    """Import `module`, which pip calls `package`; raises ValueError that names the `setting` when it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{_missing(package, setting=setting)} ({error})") from error


def _missing(package: str, *, setting: str) -> str:
    return f"{setting}: needs the package {package!r}, which is not installed; pip install {package}, or turn it off"


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # Without an origin it is a mere directory of that name: wandb itself leaves one where it is run.
    return spec is not None and spec.origin is not None
