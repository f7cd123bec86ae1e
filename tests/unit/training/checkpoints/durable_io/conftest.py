"""Checkpoint folders."""

from __future__ import annotations

import tempfile

import pytest


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path_factory, monkeypatch):
    """What other workers of pytest-xdist have in theirs is not taken for what a test left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def folder(tmp_path):
    """The checkpoint folder."""
    return tmp_path / "checkpoints"
