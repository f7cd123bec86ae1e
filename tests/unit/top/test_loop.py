"""How a job is looked at again and again, and what Ctrl-C does meanwhile."""

import os
import signal
import threading
import time

import pytest

from lightning_sm.top.loop import _pauses

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _handler():
    """Ctrl-C does afterwards what it did before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_between_two_pauses_ends_the_next_one():
    """It raises nothing where it comes, which may be in a library that cannot clean up after it."""
    with _pauses() as pause:
        assert not pause(0.0)
        os.kill(os.getpid(), signal.SIGINT)
        began = time.monotonic()
        assert pause(LONG_S)
        assert pause(LONG_S)
    assert time.monotonic() - began < LONG_S


def test_ctrl_c_ends_a_pause():
    """At once, and not when it is over."""
    sender = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with _pauses() as pause:
        sender.start()
        assert pause(LONG_S)
    sender.join()
    assert time.monotonic() - began < LONG_S
