"""Settings of the data service, for the user, and as the processes of either end get them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_sm.errors import DataSettingsError

_GIB = 1 << 30

Compression = Literal["zstd", "lz4"]


@dataclass(frozen=True)
class DataServiceSettings:
    """How data hosts serve batches and trainers fetch them.

    Args:
        workers: Worker processes on each data host. Default: one less than its CPUs.
        local_workers: Worker processes on each trainer host that help the data hosts; the host must see the data.
        window_batches: Batches per rank and loader that may be under way or ready. Default: twice the workers that
            work for a rank.
        window_bytes: The same limit in bytes.
        max_batch_bytes: Largest batch.
        hedge_factor: A batch that takes this many times the median is asked for a second time elsewhere; 0 never.
        startup_timeout_s: Seconds until a data host must have opened a loader, download and setup included.
        batch_timeout_s: Seconds until a batch must have come, also when all data hosts are gone.
        lease_s: Seconds without a sign of life from any trainer after which a data host leaves.
        compression: Compress batches on their way with zstd or lz4; for slow networks and compressible data.
        batches_per_epoch: Batches per rank in a training pass over an iterable dataset; shards that end earlier begin
            anew, what is left is dropped. Default: a single rank goes on to the end, and several ranks need equally
            many, for which a data host reads all of the dataset once and counts.
        virtual_shards: Parts into which iterable datasets are cut, a multiple of the ranks. Default: the least common
            multiple of 16 and the ranks.
        port: Port of the data hosts. Default: derived from the job.
        token: Secret that trainers must show. Default: derived from the job's name.
        tls_certificate: PEM file with the certificate of the data hosts, for the names by which trainers reach them
            (SubjectAlternativeName, for example algo-1 and algo-2); turns TLS on.
        tls_key: PEM file with the key of the certificate.
        tls_authority: PEM file with the authority that signed it; trainers show the certificate, too (mutual TLS).
    """

    workers: int | None = None
    local_workers: int = 0
    window_batches: int | None = None
    window_bytes: int = 1 * _GIB
    max_batch_bytes: int = 1 * _GIB
    hedge_factor: float = 3.0
    startup_timeout_s: float = 900.0
    batch_timeout_s: float = 300.0
    lease_s: float = 60.0
    compression: Compression | None = None
    batches_per_epoch: int | None = None
    virtual_shards: int | None = None
    port: int | None = None
    token: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("workers", "window_batches", "batches_per_epoch", "virtual_shards"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataSettingsError(f"data_service.{name}={value} must be at least 1, or left out.")
        for name in ("window_bytes", "max_batch_bytes", "startup_timeout_s", "batch_timeout_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise DataSettingsError(f"data_service.{name}={getattr(self, name)} must be positive.")
        if self.local_workers < 0:
            raise DataSettingsError(f"data_service.local_workers={self.local_workers} must not be negative.")
        if self.hedge_factor != 0 and self.hedge_factor < 1:
            raise DataSettingsError(
                f"data_service.hedge_factor={self.hedge_factor} must be at least 1, or 0 to turn hedging off."
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise DataSettingsError(
                f"data_service.tls_certificate={self.tls_certificate} and data_service.tls_key={self.tls_key} go "
                "together: set both or none."
            )


@dataclass(frozen=True)
class Credentials:
    """What both ends must agree on.

    Attributes:
        job: Name of the job.
        token: Secret that trainers must show.
        tls_certificate: PEM file with the certificate of this end.
        tls_key: PEM file with its key.
        tls_authority: PEM file with the authority that signed the other end's certificate.
    """

    job: str
    token: str
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None

    @classmethod
    def of(cls, settings: DataServiceSettings, job: str) -> Credentials:
        """Take them from the settings.

        Args:
            settings: The user's settings.
            job: Name of the job.
        """
        # Without a token of the user's, this one keeps apart jobs that meet by accident; it is no secret.
        token = settings.token or hashlib.blake2b(job.encode(), digest_size=16).hexdigest()
        return cls(job, token, settings.tls_certificate, settings.tls_key, settings.tls_authority)


@dataclass(frozen=True)
class HostSettings:
    """What the processes of one data host are told.

    Attributes:
        address: Where to listen, ``host:port`` or ``unix:path``; port 0: any.
        workers: Worker processes.
        max_batch_bytes: Largest batch.
        lease_s: Seconds without a sign of life from any trainer after which the host leaves; None: never.
        startup_timeout_s: Seconds until the first trainer must have come; None: never.
        name: Name of the host, for messages.
        credentials: Job, token, TLS files.
    """

    address: str
    workers: int
    max_batch_bytes: int
    lease_s: float | None
    startup_timeout_s: float | None
    name: str
    credentials: Credentials

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> HostSettings:
        """Rebuild from JSON values.

        Args:
            facts: What ``dataclasses.asdict`` returned.
        """
        return cls(**{**facts, "credentials": Credentials(**facts["credentials"])})


def default_workers() -> int:
    """Return the workers for this machine: one less than the CPUs that this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
