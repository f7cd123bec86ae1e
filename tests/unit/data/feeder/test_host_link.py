"""Tests of a rank's connection to a data host, with a fake host."""

import threading

from lightning_sm.data.feeder import host_link
from lightning_sm.data.feeder.host_link import HostLink
from lightning_sm.data.protocol.calls import HeartbeatRequest, HostReport
from lightning_sm.data.protocol.message_codec import decode
from lightning_sm.data.settings import Credentials
from lightning_sm.record.data_figures import HostFigures

TIMEOUT_S = 60.0
CREDENTIALS = Credentials("job", "token")


class SlowHost:
    """A fake data host that answers a heartbeat only when the test allows it.

    Attributes:
        has_heartbeat: Set when a heartbeat has arrived.
        may_answer: Set when the host may answer it.
        taken: For each heartbeat, in the order of the answers, whether it was the last one.
    """

    context = None

    def __init__(self, *_):
        self.has_heartbeat, self.may_answer = threading.Event(), threading.Event()
        self.taken = []

    def unary(self, name, request, timeout_s):
        """Answer a heartbeat."""
        assert name == "Heartbeat"
        is_last = decode(HeartbeatRequest, request, "heartbeat").is_last
        if not is_last:
            self.has_heartbeat.set()
            assert self.may_answer.wait(TIMEOUT_S)
        self.taken.append(is_last)
        return HostReport(HostFigures("algo-3", workers=1)).encode()

    def open(self, name, receiver, requests):
        """Open no stream: no batch is requested."""

    def close(self):
        """Do nothing: no connection is open."""


class Owner:
    """A rank that has measured nothing, and requests nothing."""

    figures = None
    link_frame = link_piece = print

    def link_up(self, link):
        """Request nothing."""


def test_a_host_takes_no_heartbeat_after_the_end_of_a_training(monkeypatch):
    """No heartbeat follows the last one: the host would wait for the rank's lease, and report a lost connection."""
    monkeypatch.setattr(host_link, "GrpcChannel", SlowHost)
    link = HostLink("algo-3:1", CREDENTIALS, HeartbeatRequest("rank 0", 1), Owner())
    host = link._channel
    assert host.has_heartbeat.wait(TIMEOUT_S)
    ends = threading.Thread(target=link.finish)
    ends.start()
    ends.join(0.3)  # long enough for a premature last heartbeat
    host.may_answer.set()
    ends.join(TIMEOUT_S)
    assert host.taken == [False, True]
