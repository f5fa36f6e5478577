"""What holds for all tests.

`gpu` needs a CUDA device, those that fill the machine run one after the other, and every test draws the same numbers
each time (`--seed N` draws others, to see that a test does not hold by luck).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

FILL_THE_MACHINE = ("tests/multiprocess/", "tests/e2e/", "tests/gpu/")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="what every test seeds its random numbers with (default: 0)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures: those of a module draw as well."""
    seed = item.config.getoption("--seed")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers (`pytest -n 2`), one takes all tests that need the machine; the rest go file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class OneFillsTheMachine(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "the machine" if nodeid.startswith(FILL_THE_MACHINE) else nodeid.split("::", 1)[0]

    return OneFillsTheMachine(config, log)
