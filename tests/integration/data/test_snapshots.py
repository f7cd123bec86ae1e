"""Snapshots that a data host needs before it opens a source, and what ranks ask before they have a DataModule."""

import json
import os

import pytest
from msgspec.structs import asdict

from lightning_sm.data.ipc.host_messages import NewSnapshot, StartWorkers
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.protocol.spec import snapshot_hash
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.connection import ServiceConnection
from lightning_sm.errors import DataHostMismatchError, DataHostUnreachableError
from lightning_sm.job.variables import JOB_SECRET
from tests.integration.data.fakes import begin
from tests.integration.data.test_bounds import TIMEOUT_S, Server

pytestmark = pytest.mark.processes

CONTENT = bytes(range(256)) * 20_000


@pytest.fixture
def server():
    """A server that no trainer has called yet."""
    made = Server(channels=["training", "val"])
    try:
        yield made
    finally:
        made.close()


def digest_of(content):
    """Return the digest that names a snapshot."""
    digest = snapshot_hash()
    digest.update(content)
    return digest.hexdigest()


def load(server, content):
    """Send a snapshot in pieces, and return what the main process gets."""
    pieces = (content[start : start + 1_000_000] for start in range(0, len(content), 1_000_000))
    begin(server.connect(), "Load", pieces, timeout=TIMEOUT_S).result()
    new = server.main.receive(TIMEOUT_S)
    assert isinstance(new, NewSnapshot)
    assert os.pread(new.fds[0], 2 * len(CONTENT), 0) == content
    os.close(new.fds[0])
    return new


def open_sources(server, *digests):
    """Start a call to open sources, as a rank with a lease."""
    server.start("Heartbeat", client="rank 0", world_size=1).result(TIMEOUT_S)
    openings = [asdict(Opening(f"of {digest}", digest)) for digest in digests]
    return server.start("OpenSources", client="rank 0", openings=openings)


def missing(server, *digests):
    """Return the snapshots that the host needs first."""
    return json.loads(open_sources(server, *digests).result(TIMEOUT_S))["missing"]


def test_a_host_asks_for_the_snapshots_that_it_lacks(server):
    """A host unpickles nothing before it has the snapshots."""
    digest = digest_of(CONTENT)
    assert missing(server, digest, "s") == [digest, "s"]
    assert load(server, CONTENT).digest == digest
    call = open_sources(server, digest)
    assert isinstance(server.main.receive(TIMEOUT_S), StartWorkers)
    call.cancel()


@pytest.mark.parametrize(
    "sent",
    [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x", b""],
    ids=["too short", "too long", "other bytes", "nothing"],
)
def test_a_broken_snapshot_does_not_count_as_the_snapshot(server, sent):
    """The digest of what arrives names it, so a host goes on asking for what arrived broken."""
    assert load(server, sent).digest == digest_of(sent)
    assert missing(server, digest_of(CONTENT)) == [digest_of(CONTENT)]


def connection(address, **settings):
    """Return the connection of a trainer."""
    return ServiceConnection([address], DataServiceSettings(startup_timeout_s=5.0, **settings), "local")


def test_a_trainer_learns_the_channels_of_data_hosts(server):
    """Rank 0, which has no channels, gets the data hosts' channels for the DataModule that it creates."""
    assert connection(server.address).host_channels(is_quiet=True) == ("training", "val")


def test_a_trainer_that_learns_nothing_says_why(server, monkeypatch):
    """A trainer waits for a missing host until startup_timeout_s; a wrong token is an error at once."""
    with pytest.raises(DataHostUnreachableError, match=r"channels within 5 s \(data_service.startup_timeout_s\)"):
        connection("127.0.0.1:1").host_channels(is_quiet=True)
    monkeypatch.setenv(JOB_SECRET.name, "of another job " * 4)
    with pytest.raises(DataHostMismatchError, match="refused the token"):
        connection(server.address).host_channels(is_quiet=True)
