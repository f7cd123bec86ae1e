"""Tests of the openings that ranks share on a data host, with a fake main process."""

from __future__ import annotations

import threading

import pytest

from lightning_sm.data.ipc.host_messages import KeepOpenings, StartedWorkers, StartWorkers
from lightning_sm.data.protocol.failures import Failure
from lightning_sm.data.protocol.openings import CallResult, Opening, OpeningsReply, OpeningsRequest
from lightning_sm.data.server.openings import Openings

TIMEOUT_S = 60.0
TRAIN, VAL = Opening("train", "digest"), Opening("val", "digest")
PROBLEM = Failure("RemoteTransformError", "KeyError: 3")


class Main:
    """A fake main process that answers at once, unless it is slow.

    Attributes:
        sent: The messages received.
        sources: Digests of the sources that are loaded.
        outcomes: The problem or result of each opening, by name.
        is_slow: Whether messages stay unanswered.
    """

    def __init__(self):
        self.sent, self.sources, self.outcomes, self.is_slow = [], {"digest"}, {}, False
        self.live, self._answering = [set()], []
        self.openings = Openings(self.send, self.sources.__contains__, self.live.append)

    def send(self, message):
        """Receive a message."""
        self.sent.append(message)
        if isinstance(message, StartWorkers) and not self.is_slow:
            self.answer(message.opening.name)

    def answer(self, name):
        """Answer a message from another thread, because the caller may hold the lock."""
        message = StartedWorkers(name, self.outcomes.get(name))
        thread = threading.Thread(target=self.openings.take, args=(message,))
        self._answering.append(thread)
        thread.start()

    def open(self, *openings, client="rank 0", timeout_s=TIMEOUT_S, results=()):
        """Open what a rank requests, and return the reply."""
        reply = self.openings.open(OpeningsRequest(client, list(openings), list(results)), timeout_s)
        for thread in self._answering:
            thread.join()
        return reply


@pytest.fixture
def main():
    """A fake main process."""
    return Main()


def test_ranks_share_what_is_open(main):
    """Workers are started once for all ranks, and closed when no rank needs them."""
    assert main.open(TRAIN) == OpeningsReply(["train"], [])
    assert main.open(TRAIN, VAL, client="rank 1") == OpeningsReply(["train", "val"], [])
    assert main.sent == [StartWorkers(TRAIN), StartWorkers(VAL)]
    assert main.open() == OpeningsReply([], [])
    assert set(main.live[-1]) == {"train", "val"}
    main.openings.keep(["rank 0"])
    assert main.sent[2:] == [KeepOpenings([])]
    assert (set(main.live[-1]), main.openings.sources) == (set(), set())


def test_a_source_that_is_missing_is_named(main):
    """The reply names a missing source. Openings after it wait, because a hook call changes what they see."""
    other = Opening("other", "missing")
    assert main.open(TRAIN, other, VAL) == OpeningsReply(["train"], ["missing"])
    assert main.openings.sources == {"digest", "missing"}
    main.sources.add("missing")
    assert main.open(TRAIN, other, VAL) == OpeningsReply(["train", "other", "val"], [])
    assert main.sent == [StartWorkers(TRAIN), StartWorkers(other), StartWorkers(VAL)]


def test_a_rank_does_not_wait_for_ever(main):
    """If a request times out, the rank asks again, which does not start the workers a second time."""
    main.is_slow = True
    assert main.open(TRAIN, timeout_s=0.0) == OpeningsReply([], [])
    assert main.open(TRAIN, timeout_s=0.0) == OpeningsReply([], [])
    assert main.sent == [StartWorkers(TRAIN)]
    assert set(main.live[-1]) == {"train"}, "requests may come before the answer"
    main.answer("train")
    assert main.open(TRAIN) == OpeningsReply(["train"], [])


def test_nothing_is_closed_while_others_start(main):
    """A rank that reconnects meanwhile finds all that it had opened: the main process has forgotten none of it."""
    main.open(TRAIN)
    main.is_slow = True
    main.open(TRAIN, VAL, timeout_s=0.0)
    main.openings.keep([])
    assert main.open(TRAIN, VAL, timeout_s=0.0) == OpeningsReply(["train"], [])
    main.answer("val")
    assert main.open(TRAIN, VAL) == OpeningsReply(["train", "val"], [])
    assert main.sent == [StartWorkers(TRAIN), StartWorkers(VAL)]
    assert main.open(VAL) == OpeningsReply(["val"], [])
    assert main.sent[2:] == [KeepOpenings(["val"])]


def test_a_problem_is_told_once(main):
    """A problem is reported once; the next request tries again, because the cause (a full disk) may be gone."""
    main.outcomes["train"] = PROBLEM
    assert main.open(TRAIN, VAL) == OpeningsReply(["val"], [], {"train": PROBLEM})
    assert set(main.live[-1]) == {"val"}
    del main.outcomes["train"]
    assert main.open(TRAIN, VAL) == OpeningsReply(["train", "val"], [])


def test_the_result_of_a_call_is_kept_while_it_is_open(main):
    """Every rank gets the result of a call until no rank keeps it open."""
    call = Opening("setup", "digest", is_call=True)
    main.outcomes["setup"] = CallResult(b"loaders", {"dataset": "Numbers of 3"})
    assert main.open(call).results == {}
    for client in ("rank 0", "rank 1"):
        assert main.open(call, client=client, results=["setup"]).results == main.outcomes
    main.open(client="rank 1")
    main.open()
    assert main.open(results=["setup"]).results == {}


def test_workers_that_come_too_late_end_at_once(main):
    """Workers are closed as soon as they have started if no rank needs them any more."""
    main.is_slow = True
    main.open(TRAIN, timeout_s=0.0)
    main.openings.keep([])
    main.openings.take(StartedWorkers("train"))
    assert main.sent == [StartWorkers(TRAIN), KeepOpenings([])]
    assert not main.live[-1]
