"""What the tests of the launchers open, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import logging
import threading

import psutil
import pytest

from tests.unit.launcher.peers.launchers import Lines


@pytest.fixture
def exits():
    """Closes what a test opened, also when it fails."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def lines():
    """The log lines of the launchers."""
    handler, logger = Lines(), logging.getLogger("lightning_sm.launcher.peers")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Fail a test that leaves a thread or a descriptor behind; daemon threads are not seen by the general guard."""
    threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    yield
    left = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in left:
        thread.join(1.0)  # the other end of its connection may have been closed just now
    assert not [thread.name for thread in left if thread.is_alive()]
    assert psutil.Process().num_fds() <= descriptors
