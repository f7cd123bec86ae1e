"""Whatever process is killed: what is nothing without it goes, what depends on it says so, nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader

from lightning_sm.errors import DataServiceError
from tests.integration.data.cluster import Host, remote, running
from tests.integration.data.datasets import Augmented
from tests.integration.emulators import until

pytestmark = pytest.mark.processes

# The feeder tells all hosts that the training is over, and allows those that do not answer 3 s.
FEW_SECONDS = 8.0


def make():
    """A loader whose epoch takes a few seconds."""
    return DataLoader(Augmented(4000, 0.001), batch_size=4)


def shared_memory():
    """Name and inode of every file and semaphore in /dev/shm."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
            if not path.is_dir():
                found.add((path.name, path.stat().st_ino))
    return found


def in_use():
    """Inodes in /dev/shm that a process has mapped. Not the names: semaphores are renamed after they are mapped."""
    inodes = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # Has ended, or is another user's.
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            inodes.update(int(line.split()[4]) for line in lines if "/dev/shm/" in line)
    return inodes


def unused(memory):
    """Names of what no process has mapped."""
    inodes = in_use() if memory else set()
    return [name for name, inode in memory if inode not in inodes]


@pytest.fixture(autouse=True)
def _no_named_memory():
    """Nothing stays in /dev/shm that nobody uses, and so nobody would clean up. Other tests have theirs there."""
    before = shared_memory()
    yield
    # Of another test's there may be some that is not mapped yet, or about to be removed.
    until(lambda: not unused(shared_memory() - before), "/dev/shm holds nothing more that is unused", FEW_SECONDS)


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
    """Feeder, data host, workers and server process of the same script end by themselves."""
    command = [sys.executable, "-m", "tests.integration.data.training_process"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as script:
        try:
            assert script.stdout.readline() == b"training\n"
            processes = psutil.Process(script.pid).children(recursive=True)
            assert len(processes) == 5  # feeder, main process, server process, 2 workers
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
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=90)
    child, feeder = map(int, done.stdout.split())
    try:
        assert psutil.pid_exists(child)
        if psutil.pid_exists(feeder):
            assert_gone([psutil.Process(feeder)])
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_killed_data_host_takes_its_children_with_it(host, is_frozen):
    """Workers and server process are nothing without the main process, and end with it even while they are stopped."""
    with remote([host], batch_timeout_s=20.0) as module:
        next(iter(module.train_dataloader()))
        processes = host.processes()
        assert len(processes) == 4
        if is_frozen:
            host.signal(signal.SIGSTOP)
        host.main.kill()
        assert_gone(processes)


def test_a_data_host_closes_at_once(host):
    """Closing a data host does not wait for trainers that are still connected."""
    with remote([host], batch_timeout_s=20.0) as module:
        next(iter(module.train_dataloader()))
        processes = host.processes()
        began = time.perf_counter()
        host.close()
        assert time.perf_counter() - began < 1.5
        assert_gone(processes, 0.0)


def test_a_data_host_whose_network_process_hangs_can_be_closed(host):
    """A server process that does not answer is killed."""
    host.network.suspend()
    processes = host.processes()
    host._host.close()
    assert_gone(processes, 0.0)
