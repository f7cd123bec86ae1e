"""Lets Python processes start and end sooner. Loaded by PYTHONPATH.

Start: imports make a million objects that stay, so that the collector takes a quarter of the time of importing
Lightning; here it looks at them less often, which halves that. And torchmetrics finds no torchvision, SciPy and
Matplotlib, which it imports wherever they are installed: for metrics of images and sound and for plots, which no test
uses. Scripts and other packages find them.

End: the interpreter's last garbage collections have nothing to look at. All objects of torch and Lightning take them a
second. What must happen at the end does not depend on a collection, as Python promises none (``object.__del__``).

Together that is 3 of the 7 s of CPU time of a small training, of which the tests start many hundreds. Processes in
containers and in virtual environments that tests make start and end without this, as those of users do.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HIDDEN = ("torchvision", "scipy", "matplotlib")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _EXECUTE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_EXECUTE[fullname], spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _execute_package(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    # It asks for SciPy by name, and only here.
    asked: Any = import_module("lightning_utilities.core.imports")
    is_available = asked.package_available
    asked.package_available = lambda name: name not in _HIDDEN and is_available(name)
    try:
        execute(module)
    finally:
        asked.package_available = is_available


def _execute_flags(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    for name, flag in vars(module).items():
        if str(getattr(flag, "requirement", "")).startswith(_HIDDEN):
            setattr(module, name, False)


_EXECUTE = {"torchmetrics": _execute_package, "torchmetrics.utilities.imports": _execute_flags}

gc.set_threshold(50_000, 20, 1000)
sys.meta_path.insert(0, _Finder())
atexit.register(gc.freeze)  # the first one registered is the last one called
