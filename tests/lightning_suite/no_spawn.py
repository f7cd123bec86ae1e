"""A pytest plugin that leaves out tests that spawn processes: new interpreters take most of the time of the suite."""

from __future__ import annotations

import inspect
import re

import pytest

_SPAWNS = re.compile(r"spawn|ddp_fork|ddp_notebook|_MultiProcessingLauncher")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them."""
    spawning = [item for item in items if _spawns(item)]
    items[:] = [item for item in items if item not in spawning]
    config.hook.pytest_deselected(items=spawning)


def _spawns(item: pytest.Item) -> bool:
    """Whether its parameters name a strategy that spawns; or, without one, its source."""
    parameters = item.name.partition("[")[2]
    if "strategy" in getattr(getattr(item, "callspec", None), "params", {}):
        return _SPAWNS.search(parameters) is not None
    return _SPAWNS.search(parameters + inspect.getsource(item.function)) is not None  # type: ignore[attr-defined]
