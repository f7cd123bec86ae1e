"""Lets Python processes start and end sooner. Loaded by PYTHONPATH.

Start: Lightning finds no torchvision, SciPy and Matplotlib. Torchmetrics imports them wherever they are installed, for
metrics of images and sound and for plots, which no test uses. Scripts that import one of them get it.

End: the interpreter's last garbage collections have nothing to look at. All objects of torch and Lightning take them a
second. What must happen at the end does not depend on a collection, as Python promises none (``object.__del__``).

Together that is 2.5 of the 7 s of CPU time of a small training, of which the tests start many hundreds. Processes in
containers and in virtual environments that tests make start and end without this, as those of users do.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

_ASKS = "lightning_utilities.core.imports"
_HIDDEN = frozenset({"torchvision", "scipy", "matplotlib"})


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ASKS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _hide(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _hide(module: Any) -> None:
    is_available: Callable[[str], bool] = module.package_available
    version_of: Callable[[str], str] = module._version

    def package_available(package_name: str) -> bool:
        return package_name not in _HIDDEN and is_available(package_name)

    def version(name: str) -> str:
        if name in _HIDDEN:
            raise PackageNotFoundError(name)
        return version_of(name)

    module.package_available, module._version = package_available, version


sys.meta_path.insert(0, _Finder())
atexit.register(gc.freeze)  # the first one registered is the last one called
