"""A fixture for tests that need the package transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def transformers_path() -> Iterator[None]:
    """Let this process and its children import transformers, which is installed outside the tests' environment."""
    found = list(Path(sys.prefix).glob("transformers/lib/python3.*/site-packages"))
    if not found:
        pytest.skip("needs transformers in .venv/transformers, where make proof installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(found[0])
        earlier = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(found[0]), earlier])))
        yield
