"""Owns the packages that only some sinks need: which they are, importing them, and saying beforehand which are missing.

In: one of them, or the logging section; out: the module, or an error that says which setting asked for it and how to
install it. Must never import any of them at its top.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

from rlmegatron.config.schema import LoggingConfig


@dataclass(frozen=True, slots=True)
class Package:
    """What one sink needs."""

    module: str
    """What is imported."""
    distributions: tuple[str, ...]
    """What pip calls those that bring the module; the first one is that of setup.py."""
    setting: str
    """The key of the config that asks for it."""

    @property
    def install(self) -> str:
        """The command that brings it."""
        return f"pip install {self.distributions[0]}"

    @property
    def is_installed(self) -> bool:
        """Whether the module is there; it is not imported."""
        # Not importlib.util.find_spec, which answers from what is loaded already, whatever is found by now.
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(self.module, None))), None)
        # Without an origin it is a mere directory of that name: wandb itself leaves one where it is run.
        return spec is not None and spec.origin is not None


TENSORBOARD = Package("tensorboard", ("tensorboard",), "logging.tensorboard")
WANDB = Package("wandb", ("wandb",), "logging.wandb_project")
MLFLOW = Package("mlflow", ("mlflow-skinny", "mlflow"), "logging.mlflow_uri")


def missing_packages(logging: LoggingConfig) -> list[str]:
    """One line for each sink that is asked for and whose package is not installed; imports none of them."""
    wanted = (
        (WANDB, logging.wandb_project is not None),
        (MLFLOW, logging.mlflow_uri is not None),
        (TENSORBOARD, logging.tensorboard),
    )
    return [_missing(package) for package, is_wanted in wanted if is_wanted and not package.is_installed]


def require(package: Package, *, module: str | None = None) -> Any:
    """Import `module`, by default the package's own; raises ValueError that names the setting when it is missing."""
    try:
        return importlib.import_module(module or package.module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{_missing(package)} ({error})") from error


def _missing(package: Package) -> str:
    return (
        f"{package.setting}: needs the package {package.module!r}, which is not installed; {package.install}, or turn "
        "it off"
    )
