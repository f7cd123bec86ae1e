"""Names of classes in messages, and the classes of names: only those that this process has already imported."""

from __future__ import annotations

import builtins
import sys
from types import ModuleType
from typing import Any


def class_name(cls: type) -> str:
    """Return the name by which another process finds the class, ``module:qualified.name``."""
    # In the processes that multiprocessing spawns, the module of the user's script is __mp_main__.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def find_class(name: str) -> type | None:
    """Return the class of a ``class_name``, or None if this process has not imported it. Runs no code of its module."""
    module, _, qualified_name = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        # vars() instead of getattr(): a module's __getattr__ may import a submodule.
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found if isinstance(found, type) else None


def is_hidden(cls: type) -> bool:
    """Return whether no other process can find a class by its name, because a function made it."""
    name = class_name(cls)
    # A module that this process has not imported may exist on the trainer, as may a class of its script.
    module = sys.modules.get(cls.__module__) if name.partition(":")[0] != "__main__" else None
    return "<locals>" in name or (module not in (None, builtins) and find_class(name) is None)
