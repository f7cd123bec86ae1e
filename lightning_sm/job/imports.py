"""The packages that a process has imported, by which another one can import them ahead of need."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_INSTALLED = tuple(folder + os.sep for folder in site.getsitepackages())
_OWN_PACKAGE = __name__.partition(".")[0]
# The environment with which a process was started (proc(5)); what it sets later is not in this file.
_ENVIRON = Path("/proc/self/environ")


@dataclass(frozen=True)
class Imports:
    """What a process has imported.

    Attributes:
        modules: Modules of installed packages, in the order of their imports.
        environment: Variables that the process has set; packages may have read them.
    """

    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls) -> Imports:
        """Describe this process."""
        modules = tuple(name for name, module in list(sys.modules.items()) if _is_installed(name, module))
        try:
            entries = _ENVIRON.read_bytes().split(b"\0")
        except OSError:  # not Linux
            return cls(modules)
        started = {os.fsdecode(entry) for entry in entries}
        return cls(modules, {name: value for name, value in os.environ.items() if f"{name}={value}" not in started})


def _is_installed(name: str, module: object) -> bool:
    file = getattr(module, "__file__", None) or ""
    if name == "__main__":
        return False
    return name.partition(".")[0] == _OWN_PACKAGE or file.startswith(_INSTALLED)
