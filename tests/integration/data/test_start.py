"""How the processes of a data host start, and what stops them before they serve."""

import signal

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_sm import DataHost
from lightning_sm.data.host import data_host
from lightning_sm.data.ipc.messages import MessageSocket
from lightning_sm.errors import DataServiceError
from tests.integration.data.cluster import remote
from tests.integration.data.datasets import Data

pytestmark = pytest.mark.processes


def make():
    """Return a loader of two batches."""
    return DataLoader(range(4), batch_size=2)


class Slow(Dataset):
    """One sample, which takes longer than any test."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        signal.pause()


def make_slow():
    """Return a loader whose batch never comes."""
    return DataLoader(Slow())


@pytest.fixture
def alarm():
    """A function that makes a signal handler raise TimeoutError after some seconds."""

    def expire(*_):
        raise TimeoutError("the user's")

    before = signal.signal(signal.SIGALRM, expire)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_data_host_that_does_not_listen_is_an_error(monkeypatch):
    """If imports take too long, an error gives the timeout, and the process is stopped."""
    monkeypatch.setattr(data_host, "_START_TIMEOUT_S", 0.1)
    host = DataHost()
    with pytest.raises(DataServiceError, match=r"is not listening after 0\.1 s"):
        host.__enter__()
    assert host._process.returncode == -signal.SIGTERM


def test_a_timeout_of_the_script_ends_its_waits(alarm, monkeypatch, pool):
    """A signal handler's TimeoutError, as from pytest-timeout, is neither swallowed nor mistaken for ours."""
    host, receive = DataHost(), MessageSocket.receive

    def receive_until_alarm(sock, timeout_s):
        if timeout_s:
            alarm(0.1)  # not before: starting the process may take longer
        return receive(sock, timeout_s)

    def next_until_alarm(batches):
        alarm(1.0)
        return next(batches)

    with monkeypatch.context() as patch:
        patch.setattr(MessageSocket, "receive", receive_until_alarm)
        with pytest.raises(TimeoutError, match="the user's"):
            host.__enter__()
    assert host._process.returncode == -signal.SIGTERM
    with remote([pool.hosts[0].address], Data(make_slow)) as module:
        batches = iter(module.train_dataloader())
        with pytest.raises(TimeoutError, match="the user's"):
            next_until_alarm(batches)
