"""What ranks want open on a data host; the test plays the main process."""

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
    """A main process that answers at once, unless it is slow.

    Attributes:
        sent: The messages that it got.
        sources: Digests of what it has.
        outcomes: Problem or result of an opening, by name.
        is_slow: Whether it does not answer.
    """

    def __init__(self):
        self.sent, self.sources, self.outcomes, self.is_slow = [], {"digest"}, {}, False
        self.num_changes, self._answering = 0, []
        self.openings = Openings(self.send, self.sources.__contains__, self.changed)

    def send(self, message):
        """Take a message."""
        self.sent.append(message)
        if isinstance(message, StartWorkers) and not self.is_slow:
            # The thread that sends it has the lock.
            self.answer(message.opening.name)

    def answer(self, name):
        """Answer a message."""
        message = StartedWorkers(name, self.outcomes.get(name))
        thread = threading.Thread(target=self.openings.take, args=(message,))
        self._answering.append(thread)
        thread.start()  # this one may have the lock

    def changed(self):
        """Note that other openings are live."""
        self.num_changes += 1

    def open(self, *openings, client="rank 0", timeout_s=TIMEOUT_S, results=()):
        """Have everything opened that a rank wants."""
        reply = self.openings.open(OpeningsRequest(client, list(openings), list(results)), timeout_s)
        for thread in self._answering:
            thread.join()
        return reply


@pytest.fixture
def main():
    """A main process."""
    return Main()


def test_ranks_share_what_is_open(main):
    """Workers are started once, and end when no rank wants them."""
    assert main.open(TRAIN) == OpeningsReply(["train"], [])
    assert main.open(TRAIN, VAL, client="rank 1") == OpeningsReply(["train", "val"], [])
    assert main.sent == [StartWorkers(TRAIN), StartWorkers(VAL)]
    assert main.open() == OpeningsReply([], [])
    assert set(main.openings.live) == {"train", "val"}
    main.openings.keep(["rank 0"])
    assert main.sent[2:] == [KeepOpenings([])]
    assert (set(main.openings.live), main.openings.sources, main.num_changes) == (set(), set(), 1)


def test_a_source_that_is_missing_is_named(main):
    """What is there is opened."""
    other = Opening("other", "missing")
    assert main.open(TRAIN, other) == OpeningsReply(["train"], ["missing"])
    assert main.openings.sources == {"digest", "missing"}
    main.sources.add("missing")
    assert main.open(TRAIN, other) == OpeningsReply(["train", "other"], [])


def test_a_rank_does_not_wait_for_ever(main):
    """It asks again, and workers that start are not started a second time."""
    main.is_slow = True
    assert main.open(TRAIN, timeout_s=0.0) == OpeningsReply([], [])
    assert main.open(TRAIN, timeout_s=0.0) == OpeningsReply([], [])
    assert main.sent == [StartWorkers(TRAIN)]
    assert set(main.openings.live) == {"train"}, "requests may come before the answer"
    main.answer("train")
    assert main.open(TRAIN) == OpeningsReply(["train"], [])


def test_a_problem_is_told_once(main):
    """The next time the host tries again: the cause may be gone, such as a full disk."""
    main.outcomes["train"] = PROBLEM
    assert main.open(TRAIN, VAL) == OpeningsReply(["val"], [], {"train": PROBLEM})
    assert set(main.openings.live) == {"val"}
    del main.outcomes["train"]
    assert main.open(TRAIN, VAL) == OpeningsReply(["train", "val"], [])


def test_the_result_of_a_call_is_kept_while_it_is_open(main):
    """Other ranks get it, too."""
    call = Opening("setup", "digest", is_call=True)
    main.outcomes["setup"] = CallResult(b"loaders", {"dataset": "Numbers of 3"})
    assert main.open(call).results == {}
    for client in ("rank 0", "rank 1"):
        assert main.open(call, client=client, results=["setup"]).results == main.outcomes
    main.open(client="rank 1")
    main.open()
    assert main.open(results=["setup"]).results == {}


def test_workers_that_come_too_late_end_at_once(main):
    """The rank that wanted them has left meanwhile."""
    main.is_slow = True
    main.open(TRAIN, timeout_s=0.0)
    main.openings.keep([])
    main.openings.take(StartedWorkers("train"))
    assert main.sent == [StartWorkers(TRAIN), KeepOpenings([])]
    assert not main.openings.live
