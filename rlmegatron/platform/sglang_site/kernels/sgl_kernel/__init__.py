"""Stands in for SGLang's compiled kernels on a CPU whose models run on SGLang's own PyTorch code.

In: the import of any operator by name. Out: a function that raises and names the operator when it is called. Must never
implement an operator, so that a wrong number can never come from here.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but SGLang's compiled kernels are not installed here")

    missing.__name__ = name
    return missing
