"""The shape of torch_geometric, which lies beside the scripts that import it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "integration" / "public" / "scripts"


def import_data() -> ModuleType:
    """Import ``torch_geometric.data`` for good, for example in a data host of a test."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("torch_geometric.data")
    finally:
        sys.path.remove(str(FOLDER))


@contextmanager
def imported_data() -> Iterator[ModuleType]:
    """Import ``torch_geometric.data`` within a context, also where the library itself is installed."""
    others = _forget()
    try:
        yield import_data()
    finally:
        _forget()
        sys.modules.update(others)


def _forget() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "torch_geometric"]
    return {name: sys.modules.pop(name) for name in names}
