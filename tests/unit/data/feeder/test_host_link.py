"""The connection of a rank to a data host; the test plays the host."""

import threading

from lightning_sm.data.feeder import host_link
from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.protocol.calls import HeartbeatRequest, HostReport
from lightning_sm.data.settings import Credentials

TIMEOUT_S = 60.0
CREDENTIALS = Credentials("job", "token")


class SlowHost:
    """A data host that takes a heartbeat only when the test says so.

    Attributes:
        has_heartbeat: Whether one has come.
        may_answer: Whether it may be taken.
        taken: The calls in the order in which the host has taken them.
    """

    context = None

    def __init__(self, *_):
        self.has_heartbeat, self.may_answer = threading.Event(), threading.Event()
        self.taken = []

    def unary(self, name, request, timeout_s):
        """Take a call."""
        if name == "Heartbeat":
            self.has_heartbeat.set()
            assert self.may_answer.wait(TIMEOUT_S)
        self.taken.append(name)
        return HostReport("algo-3", workers=1, busy=0, queued=0).encode()

    def close(self):
        """Nothing is open."""


class Owner:
    """A rank that has measured nothing."""

    figures = None


def test_a_host_takes_no_heartbeat_after_the_end_of_a_training(monkeypatch):
    """It would wait for this rank until its lease has ended, and say that the connection was lost."""
    monkeypatch.setattr(host_link, "GrpcChannel", SlowHost)
    link = HostLink("algo-3:1", CREDENTIALS, HeartbeatRequest("rank 0", 1), Owner())
    host = link._channel
    assert host.has_heartbeat.wait(TIMEOUT_S)
    ends = threading.Thread(target=link.finish)
    ends.start()
    ends.join(0.3)  # it would have told the host by then
    host.may_answer.set()
    ends.join(TIMEOUT_S)
    assert host.taken == ["Heartbeat", "Finish"]
