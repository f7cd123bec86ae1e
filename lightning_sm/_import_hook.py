"""Changes to third-party modules, applied when they are imported, because importing them early would take seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(names: Sequence[str], change: Callable[[ModuleType], None]) -> None:
    """Change modules that this process has imported or will import.

    Args:
        names: Names of the modules.
        change: Called with each module after the module has been executed.
    """
    for name in names:
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _ChangingFinder(names, change))


class _ChangingFinder:
    """A finder that delegates to the other finders, and applies the change after a module has been executed."""

    def __init__(self, names: Sequence[str], change: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._change = change

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = partial(self._execute, execute)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._change(module)
