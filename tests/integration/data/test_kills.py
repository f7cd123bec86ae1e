"""Whatever process is killed: what is nothing without it goes, what depends on it says so, nothing is left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from torch.utils.data import DataLoader

from lightning_sm.errors import DataServiceError
from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.datasets import Augmented

pytestmark = pytest.mark.processes

# The feeder tells all hosts that the training is over, and allows those that do not answer 3 s.
FEW_SECONDS = 8.0


def make():
    """A loader whose epoch takes a few seconds."""
    return DataLoader(Augmented(4000, 0.001), batch_size=4)


@pytest.fixture(autouse=True)
def _no_named_memory():
    """Nothing stays in /dev/shm, which nobody would clean up."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


@pytest.fixture
def host():
    """A data host for one test."""
    with running(Host("a", make)) as (started,):
        yield started


def assert_gone(processes, timeout_s=FEW_SECONDS):
    """Wait for processes to end, of which some are no children of this one."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_feeder_is_an_error(host):
    """The training process says what died, and how; the data host goes on and serves the next training."""
    with remote([host]) as module:
        stream = iter(module.train_dataloader())
        next(stream)
        os.kill(module._client.pid, signal.SIGKILL)
        with pytest.raises(
            DataServiceError, match=r"The feeder process of this rank \(pid \d+\) was killed by SIGKILL"
        ):
            list(stream)
    with remote([host]) as module:
        assert next(iter(module.train_dataloader()))["index"].tolist() == [0, 1, 2, 3]


def test_a_killed_training_process_takes_everything_with_it():
    """Feeder, data host, workers and network process of the same script end by themselves."""
    command = [sys.executable, "-m", "tests.integration.data.training_process"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as script:
        try:
            assert script.stdout.readline() == b"training\n"
            processes = psutil.Process(script.pid).children(recursive=True)
            assert len(processes) == 5  # feeder, main process, network process, 2 workers
        finally:
            script.kill()
    assert_gone(processes)


def test_a_feeder_ends_although_a_child_of_the_training_process_lives_on(host):
    """A forked child holds copies of the training process's sockets, and must not keep the feeder alive."""
    code = (
        "import os, signal, sys, threading\n"
        "from tests.integration.data.cluster import remote\n"
        f"with remote([{host.address!r}]) as module:\n"
        "    next(iter(module.train_dataloader()))\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.close(1)\n"
        "        threading.Event().wait(60)\n"
        "    print(child, module._client.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=30)
    child, feeder = map(int, done.stdout.split())
    try:
        assert psutil.pid_exists(child)
        if psutil.pid_exists(feeder):
            assert_gone([psutil.Process(feeder)])
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_killed_data_host_takes_its_children_with_it(host, is_frozen):
    """Workers and network process are nothing without the main process, and end with it even while they are stopped."""
    with remote([host], batch_timeout_s=2.0) as module:
        next(iter(module.train_dataloader()))
        processes = host.processes()
        assert len(processes) == 4
        if is_frozen:
            host.signal(signal.SIGSTOP)
        host.main.kill()
        assert_gone(processes)


def test_a_data_host_closes_at_once(host):
    """Closing a data host does not wait for trainers that are still connected."""
    with remote([host], batch_timeout_s=2.0) as module:
        next(iter(module.train_dataloader()))
        processes = host.processes()
        began = time.perf_counter()
        host.close()
        assert time.perf_counter() - began < 1.5
        assert_gone(processes, 0.0)


def test_a_data_host_whose_network_process_hangs_can_be_closed(host):
    """A network process that does not answer is killed."""
    host.network.suspend()
    processes = host.processes()
    host._host.close()
    assert_gone(processes, 0.0)
