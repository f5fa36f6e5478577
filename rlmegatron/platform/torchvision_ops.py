"""Lets torchvision be imported beside a CPU build of torch when its own compiled library does not load there.

In: nothing. Out: an import hook in `sys.meta_path` that declares the two operators torchvision registers fake kernels
for while it is imported. Must never import torch or torchvision before somebody asks for torchvision.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

OPERATORS = ("nms", "qnms")
_LIBRARIES: list[object] = []  # an operator lives as long as the library object that declared it


class _DeclareBeforeImport:
    """A finder that declares the operators when torchvision is first looked up, then steps out of the way."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_torchvision_operators()
        return None


def install_torchvision_hook() -> None:
    """Prepare this process for `import torchvision`; does nothing when that is done already or comes too late."""
    if "torchvision" in sys.modules or any(isinstance(finder, _DeclareBeforeImport) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _DeclareBeforeImport())


def declare_torchvision_operators() -> None:
    """Declare `torchvision::nms` and `qnms` by schema, unless torchvision's own library loads and brings them."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None or _own_library_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _own_library_loads() -> bool:
    import torch

    found = importlib.machinery.PathFinder.find_spec("torchvision")
    if found is None or found.submodule_search_locations is None:
        return False
    library = importlib.machinery.PathFinder.find_spec("_C", list(found.submodule_search_locations))
    if library is None or library.origin is None:
        return False
    try:
        torch.ops.load_library(library.origin)
    except OSError:
        return False
    return True
