"""Data hosts that all tests of this folder share: starting one takes seconds, serving other data does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.integration.data import numbers
from tests.integration.data.cluster import Host, running


class Pool:
    """Three data hosts, ``a``, ``b`` and ``c``, with 1, 2 and 3 workers, that serve what a test chooses.

    Args:
        folder: Where they find what to serve.
    """

    def __init__(self, folder: Path) -> None:
        self._chosen = folder / "chosen"
        self.hosts = [
            Host(
                name, partial(_make, self._chosen, "train"), workers, make_val=partial(_make, self._chosen, "validate")
            )
            for workers, name in enumerate("abc", 1)
        ]

    def serve(self, make: Callable[[], Any], make_val: Callable[[], Any] | None = None) -> list[Host]:
        """Serve what functions return, which each host calls when a trainer asks for loaders.

        Args:
            make: Returns the loaders for training.
            make_val: Returns those for validation.
        """
        self._chosen.write_bytes(cloudpickle.dumps({"train": make, "validate": make_val}))
        return self.hosts


def _make(chosen: Path, stage: str) -> Any:
    return cloudpickle.loads(chosen.read_bytes())[stage]()


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Data hosts that no test may kill."""
    made = Pool(tmp_path_factory.mktemp("pool"))
    with running(*made.hosts):
        yield made


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[numbers.Cluster]:
    """Two data hosts whose DataModule notes its hooks."""
    made = numbers.Cluster(tmp_path_factory.mktemp("cluster"))
    with made.hosts[0], made.hosts[1]:
        yield made
