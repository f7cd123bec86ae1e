"""Checkpoint folders."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from lightning_sm.training.checkpoints import durable_io


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path_factory, monkeypatch):
    """What other workers of pytest-xdist have in theirs is not taken for what a test left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def folder(tmp_path):
    """The checkpoint folder."""
    return tmp_path / "checkpoints"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A checkpoint folder on another file system than what is beside it and the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == tmp_path.stat().st_dev:
            _only_copies(monkeypatch, tmp_path / "checkpoints")
            (tmp_path / "checkpoints").mkdir()
        else:
            (tmp_path / "checkpoints").symlink_to(other)
        yield tmp_path / "checkpoints"


def _only_copies(monkeypatch, folder):
    """Let renaming into the folder fail as it does between two file systems."""
    real = os.replace

    def replace(source, destination):
        if (Path(source).parent.parent == folder) != (Path(destination).parent == folder):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
        real(source, destination)

    monkeypatch.setattr(durable_io.os, "replace", replace)
