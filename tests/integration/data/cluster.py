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
from lightning_sm.data.ipc.feeder_messages import FeederSnapshot, HostSnapshot
from lightning_sm.data.settings import DataServiceSettings
from lightning_sm.data.trainer.datamodule import RemoteDataModule
from tests.integration.data.datasets import HOST_VARIABLE, Data, stream_hash
from tests.integration.emulators import TIMEOUT_S, until

_NETWORK = "lightning_sm.data.server.process"


class _NamedHost(DataHost):
    """A data host with its name in its environment, as on a cluster."""

    _environment = threading.Lock()

    def __init__(self, name: str, address: str, workers: int) -> None:
        super().__init__(address, workers)
        self._host_name = name

    def _start(self) -> Any:
        with self._environment, pytest.MonkeyPatch.context() as patch:
            patch.setenv(HOST_VARIABLE, self._host_name)
            return super()._start()


class Host:
    """A data host that can be restarted at the same address.

    Args:
        name: Name that datasets read from its environment.
        make: Returns the loaders for training, which ``remote`` serves.
        workers: Number of worker processes.
        address: Address to listen on; port 0 is replaced by the port that it gets.
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
        """Start or restart the host, and wait until it listens."""
        if self._host is not None:
            self._host.close()
        self._host = _NamedHost(self.name, self.address, self._workers)
        self.address = self._host.__enter__().address
        return self

    @property
    def is_running(self) -> bool:
        """Whether the main process is alive."""
        if self._host is None or not psutil.pid_exists(self._host.pid):
            return False
        return self.main.status() != psutil.STATUS_ZOMBIE

    @property
    def main(self) -> psutil.Process:
        """The main process."""
        return psutil.Process(self._host.pid)

    @property
    def network(self) -> psutil.Process:
        """The server process."""
        return next(child for child in self.main.children() if _NETWORK in _command(child))

    @property
    def workers(self) -> list[psutil.Process]:
        """The workers, except killed ones that the host has not noticed yet."""
        commands = {child: _command(child) for child in self.main.children()}
        # multiprocessing starts a resource_tracker beside the processes that it spawns.
        others = re.compile(f"{_NETWORK}|resource_tracker")
        return [child for child, command in commands.items() if command and not others.search(" ".join(command))]

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the host, the main process first."""
        return [self.main, *self.main.children()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the host."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes of the host, as when the machine is switched off."""
        self.signal(signal.SIGKILL)
        self._host.close()

    def close(self) -> None:
        """Stop the host."""
        if self._host is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.signal(signal.SIGCONT)
            self._host.close()


@contextlib.contextmanager
def running(*hosts: Host) -> Iterator[list[Host]]:
    """Start hosts in parallel; close them at the end."""
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
        datamodule: The DataModule to load. Default: the data of the first host, or eight numbers.
        **settings: Settings of the data service.
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
    """Return the feeder's view of each host, once a loader of the DataModule is read."""
    return module._service_connection.feeder.snapshot().hosts


def num_in_flight(snapshot: FeederSnapshot) -> int:
    """Return the number of requests that no host has answered yet."""
    return sum(host.in_flight for host in snapshot.hosts)


def begin(module: LightningDataModule, loader: DataLoader[Any] | None = None) -> Iterator[Any]:
    """Start to read a loader, by default the training loader, and wait until all hosts have opened its dataset.

    A trainer would start without a host that is some seconds late.
    """
    batches = iter(module.train_dataloader() if loader is None else loader)
    until(lambda: {host.state for host in states(module)} == {"up"}, "all data hosts are up", TIMEOUT_S)
    return batches


def undisturbed(hosts: Sequence[Host | str], make: Callable[[], Any] | None = None, num_epochs: int = 1) -> list[str]:
    """Return the hashes of the epochs that hosts deliver with the seed of ``seeded``.

    Args:
        hosts: The hosts, or their addresses.
        make: Returns the loader. Default: the loader of the first host.
        num_epochs: Number of epochs.
    """
    with remote(hosts, None if make is None else Data(make)) as module:
        loader = seeded(module.train_dataloader())
        return [stream_hash(loader) for _ in range(num_epochs)]


def seeded(loader: Any) -> Any:
    """Return a loader whose next iterators have the order and the random numbers of ``undisturbed``."""
    torch.manual_seed(4)
    return loader


def _command(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has exited."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []
