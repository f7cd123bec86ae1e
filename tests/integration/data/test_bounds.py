"""Limits of calls with the token: no call takes over or ends a data host by accident.

The test plays the main process of the data host, which runs the user's code, so it sees what the server starts.
"""

from __future__ import annotations

import contextlib
import json

import grpc
import pytest
from msgspec.structs import asdict

from lightning_sm.data.ipc.host_messages import Finished, Serve, StartWorkers
from lightning_sm.data.ipc.messages import NothingReceivedError
from lightning_sm.data.ipc.processes import start_module
from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.settings import HostSettings
from lightning_sm.errors import DataServiceError
from tests.integration.data.cluster import remote
from tests.integration.data.fakes import begin, credentials

pytestmark = pytest.mark.processes

TIMEOUT_S = 60.0
# The digest of a source that the data host has.
DIGEST = "d" * 32


class Server:
    """The server process of a data host whose main process is this test."""

    def __init__(self, **settings):
        self.process, self.main = start_module("lightning_sm.data.server.process")
        settings = HostSettings("127.0.0.1:0", 2, 1 << 20, 60.0, None, "algo-9", credentials(), **settings)
        self.main.send(Serve(settings, snapshots=[DIGEST]))
        self.address = self.main.receive(TIMEOUT_S).address
        self._channels = contextlib.ExitStack()

    def connect(self):
        """Return a new connection: a data host accepts only a few calls at a time on each."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        return self._channels.enter_context(grpc.insecure_channel(self.address, options=options))

    def start(self, name, **values):
        """Start a call and return its future."""
        return begin(self.connect(), name, iter([json.dumps(values).encode()]), timeout=TIMEOUT_S)

    def end(self, name, **values):
        """Make a call and return its status code and text."""
        call = self.start(name, **values)
        return call.code(), call.details()

    def received(self, number, kind):
        """Return the next messages to the main process, which must all be of one type."""
        messages = [self.main.receive(TIMEOUT_S) for _ in range(number)]
        assert {type(message) for message in messages} == {kind}
        return messages

    def close(self):
        """Stop the server process."""
        self._channels.close()
        self.main.close()
        self.process.wait(TIMEOUT_S)


@pytest.fixture
def server():
    """A server that no trainer has called yet."""
    made = Server()
    try:
        yield made
    finally:
        made.close()


def test_sources_are_opened_for_ranks_that_sent_heartbeats_alone(server):
    """A rank without a lease cannot open sources, and so starts nothing."""
    opening = asdict(Opening("x", DIGEST))
    code, text = server.end("OpenSources", client="rank 0 on algo-1", openings=[opening])
    assert code is grpc.StatusCode.NOT_FOUND
    assert text == "rank 0 on algo-1 has sent no heartbeat"
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1).result()
    call = server.start("OpenSources", client="rank 0 on algo-1", openings=[opening])  # unheld, it would be cancelled
    assert server.received(1, StartWorkers) == [StartWorkers(Opening("x", DIGEST))]
    call.cancel()


def test_only_trainers_that_sent_heartbeats_can_finish(server):
    """The last heartbeat of a rank counts only if the rank has sent others."""
    for number in range(2):
        server.start("Heartbeat", client=f"rank {number} on algo-1", world_size=1, is_last=True).result()
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1).result()
    with pytest.raises(NothingReceivedError):
        server.main.receive(2.0)
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1, is_last=True).result()
    (ended,) = server.received(1, Finished)
    assert ended.reason == "the only rank has finished"


def test_trainers_of_another_training_get_no_lease(server):
    """A rank with another world size, or one too many, is refused, with both numbers, until the training is over."""
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1).result()
    for world_size in (4, 1):
        code, text = server.end("Heartbeat", client="rank 0 on other", world_size=world_size)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        expected = (
            f"rank 0 on other (world size {world_size}) is one too many; already connected: rank 0 on algo-1 (world "
        )
        assert text.startswith(expected)
    for client, world_size in (("x" * 513, 1), ("rank 0 on other", 0), ("rank 0 on other", 10**6)):
        assert server.end("Heartbeat", client=client, world_size=world_size)[0] is grpc.StatusCode.INVALID_ARGUMENT
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1, is_last=True).result()
    server.start("Heartbeat", client="rank 0 on other", world_size=4).result()


def test_a_request_is_short(server):
    """A request of more than 1 MiB is refused, with its size."""
    code, text = server.end("Heartbeat", client="x" * (1 << 20), world_size=1)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "; 1048576 bytes with" in text


def test_a_call_that_only_looks_takes_no_lease(server):
    """Status describes the data host without a lease, so it keeps no training out."""
    report = HostReport.parse(server.start("Status").result())
    assert (report.host.name, report.host.workers) == ("algo-9", 2)
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1).result()
    server.start("Heartbeat", client="rank 0 on algo-1", world_size=1, is_last=True).result()
    server.received(1, Finished)


def test_a_second_training_waits_and_says_for_whom(server):
    """A trainer without a lease retries until its startup timeout, and names the trainer that holds the lease."""
    server.start("Heartbeat", client="rank 0 on other", world_size=4).result()
    with (
        remote([server.address], startup_timeout_s=8) as module,
        pytest.raises(DataServiceError, match=r"one too many; already connected: rank 0 on other \(world size 4\)"),
    ):
        next(iter(module.train_dataloader()))
