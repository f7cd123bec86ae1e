"""The resolver of emulated hosts, for which an address does not resolve before its time (the fault ``slow-dns``).

The emulator puts a ``sitecustomize.py`` on the hosts' PYTHONPATH, which Python loads in every process, ranks included.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sm.emulator.spec import LocalHost

_FOLDER = "resolver"


def resolver_variables(host: LocalHost, resolves_at: Mapping[str, float]) -> dict[str, str]:
    """Make a folder with a host's resolver, and return the environment variables that the host needs for it.

    Args:
        host: The host.
        resolves_at: By address, the time (of ``time.monotonic``) from which it resolves.
    """
    (host.folder / _FOLDER).mkdir()
    folder = os.path.join(host.env["SAGEMAKER_BASE_DIR"], _FOLDER)
    (host.folder / _FOLDER / "sitecustomize.py").write_text(
        f"from {__name__} import hold_back\n\nhold_back({dict(resolves_at)!r}, {folder!r})\n", encoding="utf-8"
    )
    paths = [folder, *filter(None, [host.env.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def hold_back(resolves_at: Mapping[str, float], folder: str) -> None:
    """Let addresses resolve only from a given time on, and load the ``sitecustomize`` that this one hides.

    Args:
        resolves_at: By address, the time (of ``time.monotonic``) from which it resolves.
        folder: The folder of this ``sitecustomize``.
    """
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() < resolves_at.get(host, 0.0):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **kwargs)

    socket.getaddrinfo = getaddrinfo
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))
