"""Fixtures for tests that run containers: an engine and our image."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import engine as engines
from tests.containers import images
from tests.containers.local_mode import removed_network


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Docker engine that answers: the running one, or a temporary one for this test session."""
    if engines.is_running():
        with removed_network():
            yield
        return
    if missing := engines.what_is_missing():
        pytest.skip(f"no Docker engine runs, and one of the tests' own needs {', '.join(missing)}")
    kept = os.environ.get(engines.FOLDER_VARIABLE)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("engine")
    try:
        with engines.own_engine(folder), removed_network():
            yield
    finally:
        if not kept:
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def image(engine: None) -> str:
    """The name of the image built from docker/Dockerfile."""
    if missing := images.what_is_missing():
        pytest.skip(f"the image cannot be built without {', '.join(missing)}")
    return images.build_image()
