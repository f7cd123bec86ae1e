"""Fixtures for checkpoint folders."""

from __future__ import annotations

import tempfile

import pytest


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path_factory, monkeypatch):
    """Use a separate temporary directory, so that files of other pytest-xdist workers are not taken for leftovers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


@pytest.fixture
def folder(tmp_path):
    """The checkpoint folder."""
    return tmp_path / "checkpoints"
