"""How a job is looked at again and again, and what Ctrl-C does meanwhile."""

import os
import signal
import threading
import time

import pytest

from lightning_sm.top import loop
from lightning_sm.top.loop import _pauses, _run
from lightning_sm.top.snapshot import Snapshot

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _handler():
    """Ctrl-C does afterwards what it did before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


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


class _Looking:
    """Looks at a job that does nothing."""

    def look(self, hosts, others):
        """Number the snapshots by the hosts."""
        return Snapshot(hosts[0], "job")


@pytest.mark.parametrize("is_once", [True, False])
@pytest.mark.parametrize(("lives", "shown"), [([1.0, None], [1.0]), ([1.0, 2.0, None], [2.0]), ([None], [])])
def test_a_job_that_ends_at_once_is_shown_all_the_same(monkeypatch, is_once, lives, shown):
    """A script that asks for it once, as JSON too, gets a line, unless the job had ended before the first look."""
    seen = iter(lives)

    def running():
        found = next(seen, None)
        return {} if found is None else {"job": [found]}

    monkeypatch.setattr(loop, "running_jobs", running)
    monkeypatch.setattr(loop, "_GONE_S", -1.0)
    written = []
    _, was_left = _run(
        _Looking(),
        "job",
        lambda snapshot: written.append(snapshot.t),
        pause=lambda _: False,
        every_s=0.0,
        is_once=is_once,
    )
    assert written == shown
    assert not was_left
