"""Data hosts that tests start, stop, freeze and kill."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader

from lightning_sm.data.host.data_host import DataHost
from lightning_sm.data.ipc.feeder_messages import HostSnapshot
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from tests.integration.data.datasets import HOST_VARIABLE, Data, stream_hash
from tests.integration.emulators import TIMEOUT_S, until

_NETWORK = "lightning_sm.data.server.process"


class _NamedHost(DataHost):
    """A data host with a name in its environment, as each host of a cluster has its own."""

    _environment = threading.Lock()

    def __init__(self, name: str, address: str, workers: int) -> None:
        super().__init__(address, workers)
        self._host_name = name

    def _start(self) -> Any:
        with self._environment, pytest.MonkeyPatch.context() as patch:
            patch.setenv(HOST_VARIABLE, self._host_name)
            return super()._start()


class Host:
    """A data host that can be started again at the same address.

    Args:
        name: What datasets find in its environment.
        make: Returns the loaders for training that ``remote`` lets it serve.
        workers: Worker processes.
        address: Where it listens; port 0 becomes the port that it got.
        make_val: Returns the loaders for validation.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Any] = list,
        workers: int = 2,
        address: str = "127.0.0.1:0",
        make_val: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.data = Data(make, make_val)
        self._workers = workers
        self._host: DataHost | None = None

    def start(self) -> Host:
        """Start it, also after it was killed, and wait until it listens."""
        if self._host is not None:
            self._host.close()
        self._host = _NamedHost(self.name, self.address, self._workers)
        self.address = self._host.__enter__().address
        return self

    @property
    def is_running(self) -> bool:
        """Whether its main process lives."""
        if self._host is None or not psutil.pid_exists(self._host.pid):
            return False
        return self.main.status() != psutil.STATUS_ZOMBIE

    @property
    def main(self) -> psutil.Process:
        """Its main process."""
        return psutil.Process(self._host.pid)

    @property
    def network(self) -> psutil.Process:
        """Its server process."""
        return next(child for child in self.main.children() if _NETWORK in _command(child))

    @property
    def workers(self) -> list[psutil.Process]:
        """Its workers, without those that were killed and that it has not noticed yet."""
        commands = {child: _command(child) for child in self.main.children()}
        # resource_tracker: multiprocessing starts it beside the processes that it spawns.
        others = re.compile(f"{_NETWORK}|resource_tracker")
        return [child for child, command in commands.items() if command and not others.search(" ".join(command))]

    def processes(self) -> list[psutil.Process]:
        """All of them, the main process first."""
        return [self.main, *self.main.children()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Let it vanish as when the machine is switched off."""
        self.signal(signal.SIGKILL)
        self._host.close()

    def close(self) -> None:
        """Stop it."""
        if self._host is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.signal(signal.SIGCONT)
            self._host.close()


@contextlib.contextmanager
def running(*hosts: Host) -> Iterator[list[Host]]:
    """Start hosts at the same time; close them at the end."""
    try:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(Host.start, hosts))
        yield list(hosts)
    finally:
        for host in hosts:
            host.close()


@contextlib.contextmanager
def remote(
    hosts: Sequence[Host | str], datamodule: LightningDataModule | None = None, **settings: Any
) -> Iterator[RemoteDataModule]:
    """Connect to hosts, as a Trainer does.

    Args:
        hosts: The hosts, or their addresses.
        datamodule: What is loaded. Default: the data of the first one, or eight numbers.
        **settings: Of the data service.
    """
    addresses = [host if isinstance(host, str) else host.address for host in hosts]
    if datamodule is None:
        served = next((host.data for host in hosts if isinstance(host, Host)), None)
        datamodule = Data(lambda: DataLoader(range(8), 4)) if served is None else Data(served.make, served.make_val)
    module = RemoteDataModule(datamodule, addresses, settings=DataServiceSettings(**settings))
    try:
        module.setup("fit")
        yield module
    finally:
        module.teardown("fit")


def states(module: LightningDataModule) -> list[HostSnapshot]:
    """What the feeder says of each host, once a loader of the DataModule is read."""
    return module._connection.feeder.snapshot().hosts


def begin(module: LightningDataModule, loader: DataLoader[Any] | None = None) -> Iterator[Any]:
    """Begin to read a loader, by default that for training, once all hosts have opened its dataset.

    A trainer begins without a host that is late by some seconds.
    """
    batches = iter(module.train_dataloader() if loader is None else loader)
    until(lambda: {host.state for host in states(module)} == {"up"}, "all data hosts are up", TIMEOUT_S)
    return batches


def undisturbed(hosts: Sequence[Host | str], make: Callable[[], Any] | None = None, num_epochs: int = 1) -> list[str]:
    """Hashes of the epochs that hosts give with the seed of ``seeded``.

    Args:
        hosts: The hosts, or their addresses.
        make: Returns the loader. Default: that of the first host.
        num_epochs: How many.
    """
    with remote(hosts, None if make is None else Data(make)) as module:
        loader = seeded(module.train_dataloader())
        return [stream_hash(loader) for _ in range(num_epochs)]


def seeded(loader: Any) -> Any:
    """Return a loader whose next iterators have the order and the random numbers of ``undisturbed``."""
    torch.manual_seed(4)
    return loader


def _command(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []
