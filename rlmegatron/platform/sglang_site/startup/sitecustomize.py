"""Runs at the start of every process of a rollout engine on a CPU, which reaches it through PYTHONPATH.

In and out: nothing; it installs the torchvision import hook, then runs the `sitecustomize` it stands in front of, if
there is one. Must never import torch: most of these processes decide later whether they need it.
"""

import importlib.machinery
import importlib.util
import os
import sys

from rlmegatron.platform.torchvision_ops import install_torchvision_hook


def _run_shadowed_sitecustomize() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or os.getcwd()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


install_torchvision_hook()
_run_shadowed_sitecustomize()
