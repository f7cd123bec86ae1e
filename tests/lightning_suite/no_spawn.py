"""A pytest plugin that skips tests that spawn processes: new interpreters take most of the suite's time."""

from __future__ import annotations

import inspect
import re

import pytest

_SPAWNS = re.compile(r"spawn|ddp_fork|ddp_notebook|_MultiProcessingLauncher")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that spawn processes."""
    spawning = [item for item in items if _spawns(item)]
    items[:] = [item for item in items if item not in spawning]
    config.hook.pytest_deselected(items=spawning)


def _spawns(item: pytest.Item) -> bool:
    """Return whether a test spawns: judge by its strategy parameter, or else by its parameters and source."""
    parameters = item.name.partition("[")[2]
    if "strategy" in getattr(getattr(item, "callspec", None), "params", {}):
        return _SPAWNS.search(parameters) is not None
    return _SPAWNS.search(parameters + inspect.getsource(item.function)) is not None  # type: ignore[attr-defined]
