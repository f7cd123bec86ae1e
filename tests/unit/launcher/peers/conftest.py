"""Fixtures that close what the launchers' tests open, and check for leaks."""

from __future__ import annotations

import contextlib
import logging
import threading

import psutil
import pytest

from tests.unit.launcher.peers.launchers import Lines


@pytest.fixture
def exits():
    """An ExitStack that is closed after the test, even if the test fails."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def lines():
    """The launchers' log lines."""
    handler, logger = Lines(), logging.getLogger("lightning_sm.launcher.peers")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Fail a test that leaks a thread or a descriptor: the general guard does not see daemon threads."""
    threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in left:
        thread.join(1.0)  # the other end of its connection may just have been closed
    assert not [thread.name for thread in left if thread.is_alive()]
    assert psutil.Process().num_fds() <= descriptors
