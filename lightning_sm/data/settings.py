"""Settings of the data service, for users and for its processes."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_sm.errors import DataSettingsError
from lightning_sm.job.host_keys import job_key
from lightning_sm.job.topology import Topology
from lightning_sm.job.variables import JOB_SECRET

_GIB = 1 << 30

Hooks = Literal["auto", "trainers", "data"]

# With a smaller window, a slow batch keeps a rank waiting while the other workers go idle (benchmarks/schedule.py).
_MIN_WINDOW = 32
_MAX_WINDOW = 256


def default_window(num_workers: int, num_ranks: int) -> int:
    """Return how many requests a rank may have in flight or buffered.

    Args:
        num_workers: Number of workers on all data hosts.
        num_ranks: Number of ranks that share the workers.
    """
    return min(_MAX_WINDOW, max(_MIN_WINDOW, -(-8 * num_workers // num_ranks)))


@dataclass(frozen=True)
class DataServiceSettings:
    """How data hosts serve batches, and how trainers fetch them.

    Args:
        hooks: Where the DataModule's hooks run: "trainers" (as they do without data hosts) or "data" (on the data
            hosts). Use "data" for datasets that trainers cannot read, that cannot be pickled, or that are large;
            trainers then have loaders without datasets. "auto" chooses "data" if a data group has a channel that the
            trainers lack, else "trainers".
        workers: Number of worker processes on each data host. Defaults to the host's number of CPUs minus 1.
        window_batches: Maximum number of batches in flight or buffered, per rank and loader. Defaults to 32, or eight
            times a rank's share of the workers if that is more. Small batches share requests; the default then limits
            requests, not batches.
        window_bytes: Maximum size of batches in flight or buffered, per rank and loader, in bytes.
        max_batch_bytes: Maximum size of a batch in bytes.
        startup_timeout_s: Seconds within which a data host must open a dataset, including downloads and, with
            hooks=data, setup().
        batch_timeout_s: Seconds within which a batch must arrive, even if all data hosts are unreachable.
        lease_s: Seconds without a heartbeat from any trainer after which data hosts exit.
        port: Port of the data hosts. Derived from the job by default.
        trust: Addresses, host names and networks ("10.0.0.0/16") that may connect to the data hosts, in addition to the
            job's hosts and the data host's machine. Needed only for data hosts that are started by hand, and for
            trainers that do not connect from the address that their host name resolves to.
        tls_certificate: PEM file with the certificate of the data hosts; turns TLS on. Its SubjectAlternativeName must
            include the names or addresses by which trainers reach the data hosts: algo-1, algo-2 and so on in a job,
            127.0.0.2, 127.0.0.3 and so on with ``lightning-sm local``.
        tls_key: PEM file with the certificate's private key.
        tls_authority: PEM file with the certificate authority that signed the certificate. Trainers then also present
            the certificate (mutual TLS), and may connect from any address.

    Raises:
        DataSettingsError: A value is out of range, an entry of trust is invalid, or only some of the TLS files that
            belong together are set.
    """

    hooks: Hooks = "auto"
    workers: int | None = None
    window_batches: int | None = None
    window_bytes: int = 1 * _GIB
    max_batch_bytes: int = 1 * _GIB
    startup_timeout_s: float = 900.0
    batch_timeout_s: float = 300.0
    lease_s: float = 60.0
    port: int | None = None
    # Excluded from the hash: lists cannot be hashed, and a process finds its connection by a key that includes these
    # settings.
    trust: list[str] | None = field(default=None, hash=False)
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None

    def port_in(self, topology: Topology) -> int:
        """Return the port of a job's data hosts."""
        return self.port or topology.data_port

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("workers", "window_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataSettingsError(f"data_service.{name}={value} must be at least 1, or left out.")
        for name in ("window_bytes", "max_batch_bytes", "startup_timeout_s", "batch_timeout_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise DataSettingsError(f"data_service.{name}={getattr(self, name)} must be positive.")
        if self.hooks not in get_args(Hooks):
            raise DataSettingsError(
                f"data_service.hooks={self.hooks!r} must be one of {', '.join(map(repr, get_args(Hooks)))}."
            )
        for entry in self.trust or ():
            _check_trusted(entry)
        if (self.tls_certificate is None) != (self.tls_key is None) or (self.tls_authority and not self.tls_key):
            raise DataSettingsError(
                f"data_service.tls_certificate={self.tls_certificate} and data_service.tls_key={self.tls_key} go "
                f"together, and data_service.tls_authority={self.tls_authority} needs both."
            )


def _check_trusted(entry: str) -> None:
    """Check an entry of ``trust``; the data host looks up names later."""
    if "/" in entry or ":" in entry:
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            raise DataSettingsError(
                f"data_service.trust has {entry!r} ({error}). Expected an address, a host name, or a network such as "
                "10.0.0.0/16, without a port."
            ) from error


@dataclass(frozen=True)
class Credentials:
    """The job, token and TLS files that data hosts and trainers must agree on.

    Attributes:
        job: Name of the job.
        token: The secret that each side must prove it knows.
        tls_certificate: PEM file with this side's certificate.
        tls_key: PEM file with the certificate's private key.
        tls_authority: PEM file with the authority that signed the other side's certificate.
        token_source: The source of the token, for messages.
    """

    job: str
    token: str = field(repr=False)
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None
    token_source: str = ""

    @classmethod
    def of(cls, settings: DataServiceSettings, job: str, env: Mapping[str, str] = os.environ) -> Credentials:
        """Derive the credentials from the user's settings.

        Args:
            settings: The settings.
            job: Name of the job.
            env: Environment variables, which may contain the job's secret.

        Raises:
            JobConfigError: The job's secret is too short.
        """
        return cls(
            job,
            job_key("lightning-sm data hosts", job, env).hex(),
            settings.tls_certificate,
            settings.tls_key,
            settings.tls_authority,
            token_source=JOB_SECRET.name if env.get(JOB_SECRET.name) else "the job's name",
        )


@dataclass(frozen=True)
class HostSettings:
    """Settings for the processes of one data host.

    Attributes:
        address: The ``host:port`` to listen on; with port 0, the system chooses a port.
        workers: Number of worker processes.
        max_batch_bytes: Maximum size of a batch in bytes.
        lease_s: Seconds without a heartbeat from any trainer after which the host exits; None for never.
        startup_timeout_s: Seconds within which the first trainer must connect; None for no limit.
        name: Name of the host, for messages.
        credentials: Job, token and TLS files.
        may_restart: Whether trainers may restart after they have finished.
        trusted: Addresses, host names and networks that may connect, in addition to this machine.
        channels: Names of the host's input channels.
    """

    address: str
    workers: int
    max_batch_bytes: int
    lease_s: float | None
    startup_timeout_s: float | None
    name: str
    credentials: Credentials
    may_restart: bool = False
    channels: list[str] = field(default_factory=list)
    trusted: list[str] = field(default_factory=list)


def default_workers(cpus: int) -> int:
    """Return a data host's default number of workers, which leaves one CPU for the server process."""
    return max(1, cpus - 1)
