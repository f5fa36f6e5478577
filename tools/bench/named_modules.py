"""A module tree that holds given parameters under given dotted names, and computes nothing.

In: names and tensors. Out: a module whose `named_parameters()` are exactly those, as SGLang's and Megatron's models
have them. Must import torch alone: an engine's worker process starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def hang_up(root: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Register every tensor below `root` as a parameter that needs no gradient; modules on the way are made."""
    for path, tensor in parameters.items():
        above, name = owner_of(root, path)
        above.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def owner_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that has, or is to have, what `path` names, and the name there."""
    *modules, name = path.split(".")
    for module in modules:
        if module not in root._modules:
            root.add_module(module, nn.Module())
        found = root._modules[module]
        assert found is not None, f"{path}: {module} is an empty module"
        root = found
    return root, name
