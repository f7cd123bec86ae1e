"""A training process's connection to the data hosts, through its feeder process."""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from typing import Any, ClassVar

from lightning_sm.data.ipc.feeder_messages import Configure
from lightning_sm.data.protocol.calls import HeartbeatRequest, HostReport
from lightning_sm.data.protocol.grpc_client import GrpcChannel
from lightning_sm.data.protocol.grpc_status import CallError
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials, DataServiceSettings, default_window
from lightning_sm.data.trainer.feeder_client import FeederClient
from lightning_sm.data.trainer.reporter import Reporter
from lightning_sm.data.trainer.slots import SlotPool
from lightning_sm.errors import DataHostMismatchError, DataHostUnreachableError, DataServiceError, DataSettingsError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.rank_starter import RankStart, RankStarter
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import DATA_CHANNELS

logger = logging.getLogger(__name__)

# Stands in for a job name that is unknown.
UNNAMED_JOB = "unnamed"

_CALL_TIMEOUT_S = 5.0
_PAUSE_S = 0.5
_REPORT_PERIOD_S = 30.0


class ServiceConnection:
    """One rank's connection to the data hosts.

    Args:
        addresses: Addresses of the data hosts, ``host:port``.
        settings: Window, timeouts and credentials.
        job: Name of the job.
        is_of_job: Whether the data hosts belong to the same SageMaker job. If so, they run the same script, and the
            connection stays open until the process exits, because a script may run several Trainers.
        channels: Names of this host's input channels.
        host: Name of this host in the job. Defaults to the machine's name.

    Attributes:
        closes_on_teardown: Whether the connection closes at the end of a Trainer's run.
        reporter: Reports the measurements of the rank and the data hosts.
        slots: Memory for the batches of all loaders, while the connection is open.
    """

    _of_jobs: ClassVar[dict[Any, ServiceConnection]] = {}

    def __init__(
        self,
        addresses: Sequence[str],
        settings: DataServiceSettings,
        job: str,
        *,
        is_of_job: bool = False,
        channels: Iterable[str] = (),
        host: str | None = None,
    ) -> None:
        self.addresses = list(addresses)
        self.settings = settings
        self.job = job
        self.is_of_job = is_of_job
        self.closes_on_teardown = not is_of_job
        self.reporter = Reporter(lambda: self.feeder)
        self._channels = frozenset(channels)
        self._host = host or socket.gethostname()
        self._host_channels: tuple[str, ...] | None = None
        self._feeder: FeederClient | None = None
        self._num_ranks = 1

    @classmethod
    def of_job(cls, job: SageMakerJob, topology: Topology, settings: DataServiceSettings) -> ServiceConnection:
        """Return this process's connection to its job's data hosts; DataModules with the same settings share it.

        Raises:
            DataSettingsError: mpirun started this rank without the job's name.
        """
        if job.name is None and RankStart.detect(os.environ, os.getppid()).launcher is RankStarter.MPI:
            raise DataSettingsError(
                f"mpirun started this rank on {job.current_host} without TRAINING_JOB_NAME, from which the data hosts "
                f"({', '.join(topology.data_hosts)}) derive their port and token. Add -x TRAINING_JOB_NAME to mpirun."
            )
        port = settings.port_in(topology)
        addresses = [f"{job.addresses.get(host, host)}:{port}" for host in topology.data_hosts]
        key = (tuple(addresses), settings, job.name)
        if key not in cls._of_jobs:
            name, host = job.name or UNNAMED_JOB, job.current_host
            cls._of_jobs[key] = cls(addresses, settings, name, is_of_job=True, channels=job.channels, host=host)
        return cls._of_jobs[key]

    @classmethod
    def of_addresses(
        cls, addresses: Sequence[str] | ServiceConnection | None, settings: DataServiceSettings, job: str
    ) -> ServiceConnection | None:
        """Return a connection to data hosts.

        Args:
            addresses: Addresses of the data hosts, or an existing connection; None for the job's data hosts.
            settings: Settings of the data service.
            job: Name of the job to which the data hosts belong.

        Returns:
            The connection, or None if there is no job with data hosts.

        Raises:
            DataSettingsError: The list of addresses is empty.
        """
        if isinstance(addresses, ServiceConnection):
            return addresses
        if addresses is None:
            facts = SageMakerJob.from_environment()
            topology = None if facts is None else Topology.from_job(facts)
            return cls.of_job(facts, topology, settings) if facts and topology and topology.data_hosts else None
        if not addresses:
            raise DataSettingsError(
                "RemoteDataModule got an empty list of addresses. Pass the address of at least one data host "
                "(addresses=[...]), or None for the job's data hosts."
            )
        return cls(addresses, settings, job)

    def __reduce__(self) -> Any:
        """Pickle the connection without this process's state."""
        make = partial(ServiceConnection, is_of_job=self.is_of_job, channels=self._channels)
        return make, (self.addresses, self.settings, self.job)

    @property
    def feeder(self) -> FeederClient:
        """The connection to the feeder process.

        Raises:
            DataServiceError: The connection is closed.
        """
        if self._feeder is None:
            raise DataServiceError("The connection to the data hosts is closed.")
        return self._feeder

    def open(self, rank: int, num_ranks: int, *, is_quiet: bool) -> None:
        """Start the feeder process, unless the connection is already open.

        Args:
            rank: This rank.
            num_ranks: Number of ranks that share the data hosts.
            is_quiet: Whether another rank on this host logs the messages that are common to all ranks.

        Raises:
            DataSettingsError: A TLS file cannot be read.
        """
        if self._feeder is not None:
            return
        self._num_ranks = num_ranks
        client = HeartbeatRequest(f"rank {rank} on {self._host}", num_ranks, wants_figures=rank == 0)
        credentials = Credentials.of(self.settings, self.job)
        read_tls(credentials)  # report an unreadable file here instead of in the feeder process
        self._feeder = FeederClient(Configure(self.addresses, credentials, client, is_quiet=is_quiet))
        weakref.finalize(self, self._feeder.close)
        self.slots = SlotPool(self._feeder, self.settings.max_batch_bytes)

    def host_channels(self, *, is_quiet: bool) -> tuple[str, ...]:
        """Return the names of the data hosts' input channels, as soon as one of the hosts has run the script.

        Only the first call asks the data hosts. If a command line is checked before any data hosts exist, the names
        come from the environment.

        Args:
            is_quiet: Whether another rank on this host logs the messages that are common to all ranks.

        Raises:
            DataHostUnreachableError: No data host answered in time.
            DataHostMismatchError: The data hosts refuse this rank.
        """
        if self._host_channels is None:
            self._host_channels = DATA_CHANNELS.read(os.environ)
        if self._host_channels is None:
            self._host_channels = self._ask_for_channels(is_quiet=is_quiet)
        return self._host_channels

    def _ask_for_channels(self, *, is_quiet: bool) -> tuple[str, ...]:
        """Ask the data hosts in turn for their channels, until one that has run the script answers."""
        credentials, timeout_s = Credentials.of(self.settings, self.job), self.settings.startup_timeout_s
        deadline = time.monotonic() + timeout_s
        report_at = time.monotonic() + _REPORT_PERIOD_S
        for address in cycle(self.addresses):
            try:
                with closing(GrpcChannel(address, credentials)) as channel:
                    return tuple(HostReport.parse(channel.unary("Status", b"", _CALL_TIMEOUT_S)).channels)
            except CallError as error:
                why = f"data host at {address}: {error}"
                if error.is_final:
                    raise DataHostMismatchError(why) from error
            now = time.monotonic()
            if now >= deadline:
                break
            if now >= report_at and not is_quiet:
                report_at = now + _REPORT_PERIOD_S
                logger.info("Waiting for a data host to run the script and report its channels: %s", why)
            time.sleep(_PAUSE_S)
        raise DataHostUnreachableError(
            f"No data host reported its channels within {timeout_s:.0f} s (data_service.startup_timeout_s): {why}. See "
            "the logs of the data hosts."
        )

    def runs_hooks(self, *, is_quiet: bool) -> bool:
        """Return whether the data hosts run the DataModule's hooks.

        Args:
            is_quiet: Whether another rank on this host logs the messages that are common to all ranks.

        Raises:
            DataServiceError: In a job, for the same reasons as ``host_channels``.
        """
        if self.settings.hooks != "auto" or not self.is_of_job:
            return self.settings.hooks == "data"
        missing = sorted(set(self.host_channels(is_quiet=is_quiet)) - self._channels)
        if missing and not is_quiet:
            logger.info(
                "The data hosts run the DataModule's hooks, because they have channels that the trainers lack (%s). "
                "See data_service.hooks.",
                ", ".join(missing),
            )
        return bool(missing)

    def end_run(self) -> None:
        """Disconnect at the end of a Trainer's run, however it ends, unless the data hosts belong to a job."""
        if self.closes_on_teardown:
            self.close()

    def close(self) -> None:
        """Disconnect this rank and stop its feeder process."""
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None
            del self.slots

    def default_window(self) -> int:
        """Return the default window for the number of workers on all data hosts, an estimate until all are known."""
        known = [host.workers for host in self.feeder.snapshot().hosts if host.workers]
        workers = sum(known) * len(self.addresses) // max(1, len(known))
        return default_window(workers, self._num_ranks)
