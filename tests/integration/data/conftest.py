"""Data hosts shared by all tests of this folder: starting one takes seconds, changing its data does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.data import numbers
from tests.integration.data.cluster import Host, running
from tests.integration.data.datasets import Data


class Pool:
    """Three data hosts, ``a``, ``b`` and ``c``, with 1, 2 and 3 workers, that serve what a test chooses."""

    def __init__(self) -> None:
        self.hosts = [Host(name, workers=workers) for workers, name in enumerate("abc", 1)]

    def serve(self, make: Callable[[], Any], make_val: Callable[[], Any] | None = None) -> list[Host]:
        """Let ``remote`` serve loaders from functions, which each host calls when a trainer asks for loaders.

        Args:
            make: Returns the loaders for training.
            make_val: Returns the loaders for validation.
        """
        for host in self.hosts:
            host.data = Data(make, make_val)
        return self.hosts


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Data hosts that no test may kill."""
    made = Pool()
    with running(*made.hosts):
        yield made


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> numbers.Cluster:
    """Trainings on two data hosts, whose DataModule records its hooks."""
    return numbers.Cluster(tmp_path_factory.mktemp("cluster"), pool.hosts[:2])
