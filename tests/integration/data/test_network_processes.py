"""A data host with several network processes: ranks get the same batches from each of them, whatever happens to it."""

import contextlib
import json
import signal
import socket

import psutil
import pytest
from torch.utils.data import DataLoader

from lightning_sm import DataHost
from lightning_sm.data.protocol.frames import FrameKind, frame
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.errors import BatchTypeError
from tests.integration.data.cluster import remote, seeded, undisturbed
from tests.integration.data.datasets import Augmented, Data, stream_hash
from tests.integration.data.fakes import FakeHost
from tests.integration.emulators import until

pytestmark = pytest.mark.processes

LENGTH, BATCH_SIZE = 203, 8
TIMEOUT_S = 60.0
MODULE = "lightning_sm.data.server.network_process"


def make():
    """Shuffled, augmented samples, of which a batch takes some milliseconds."""
    return DataLoader(Augmented(LENGTH, delay_s=0.002), batch_size=BATCH_SIZE, shuffle=True)


@pytest.fixture(scope="module")
def expected(pool):
    """The streams of two epochs on another host, of which nothing is killed."""
    return undisturbed(pool.hosts[1:2], make, 2)


@pytest.fixture(scope="module")
def shared_host():
    """A data host with a network process beside the server process."""
    with DataHost(workers=2, settings=DataServiceSettings(network_processes=2)) as host:
        yield host


@pytest.fixture
def host(shared_host):
    """The same, once its network process listens."""
    until(lambda: network_process(shared_host) is not None, "the network process listens", TIMEOUT_S)
    return shared_host


def network_process(host):
    """The network process that listens, if there is one."""
    for process in psutil.Process(host.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if MODULE in process.cmdline() and process.net_connections():
                return process
    return None


def num_streams(process):
    """How many trainers are connected to a process."""
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections())


def read(loader, at_batch=None):
    """Take an epoch, and call a function before its fourth batch."""
    batches = []
    for number, batch in enumerate(loader):
        if number == 3 and at_batch is not None:
            at_batch()
        batches.append(batch)
    return stream_hash(batches)


def test_a_network_process_sends_the_same_batches(host, expected):
    """The first rank's stream goes to it, and the batches are those that one process computes."""
    with remote([host.address], Data(make)) as module:
        seen, loader = [], module.train_dataloader()
        assert read(seeded(loader), lambda: seen.append(num_streams(network_process(host)))) == expected[0]
        assert seen == [1]


def test_a_killed_network_process_costs_no_batch(host, expected):
    """The data host starts its network processes again; the epoch continues, and the next one comes from there."""
    with remote([host.address], Data(make)) as module:
        killed, loader = network_process(host), module.train_dataloader()
        assert read(seeded(loader), killed.kill) == expected[0]
        until(lambda: network_process(host) not in (None, killed), "another network process listens", TIMEOUT_S)
        assert read(loader) == expected[1]


@pytest.mark.proof
def test_a_frozen_network_process_is_replaced(host, expected):
    """It has slots of the workers: it is killed once it does not answer, as if it had died, and the epoch continues."""
    with remote([host.address], Data(make)) as module:
        frozen = network_process(host)
        assert read(seeded(module.train_dataloader()), lambda: frozen.send_signal(signal.SIGSTOP)) == expected[0]
        assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE


def test_a_killed_server_process_takes_its_network_processes_with_it(host, expected):
    """The main process starts a new server process, and this one new network processes; nothing is lost."""
    (server,) = [child for child in psutil.Process(host.pid).children() if child.children()]
    old = network_process(host)
    with remote([host.address], Data(make)) as module:
        assert read(seeded(module.train_dataloader()), server.kill) == expected[0]
        until(lambda: not old.is_running(), "the old network process ends", TIMEOUT_S)


def test_a_port_that_cannot_be_reached_is_not_needed():
    """A firewall may admit the port of the data host only: then the stream goes there, too."""

    def answer(request_id):
        failure = json.dumps({"error": "BatchTypeError", "text": "it was asked", "where": ""}).encode()
        return [frame(request_id, FrameKind.FAILURE, len(failure)) + failure]

    host = FakeHost(answer)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen, and nobody else can
        stream_port = closed.getsockname()[1]
        host.heartbeat = json.dumps({**json.loads(host.heartbeat), "stream_port": stream_port}).encode()
        with (
            host.serving() as address,
            remote([address]) as module,
            pytest.raises(BatchTypeError, match="it was asked"),
        ):
            list(module.train_dataloader())
