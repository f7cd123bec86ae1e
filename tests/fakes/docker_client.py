"""A stand-in for Docker's client on the PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def install(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a script as the command docker, and return the file whose path it gets in ``$CALLS``."""
    client = folder / "bin" / "docker"
    client.parent.mkdir()
    client.write_text(script)
    client.chmod(0o700)
    monkeypatch.setenv("PATH", f"{client.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    return folder / "calls"
