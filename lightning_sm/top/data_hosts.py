"""The status of a job's data hosts, by a call of the data service that grants no lease."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.protocol.grpc_client import GrpcChannel
from lightning_sm.data.protocol.grpc_status import CallError, CallStatus
from lightning_sm.data.settings import Credentials, DataServiceSettings
from lightning_sm.errors import DataServiceError, JobConfigError, WireError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import unquoted
from lightning_sm.job.topology import Topology

_PREFIX = "data_service."
_ASK_S = 1.0
_SETTINGS = ("token", "tls_certificate", "tls_key", "tls_authority")


@dataclass(frozen=True)
class HostAnswer:
    """The answer of a data host.

    Attributes:
        report: How it is; None if it did not answer.
        problem: Why not.
    """

    report: HostReport | None = None
    problem: str = ""


class StatusPoller:
    """Connections to the data hosts of a job, by address."""

    def __init__(self) -> None:
        self._channels: dict[str, GrpcChannel] = {}

    def ask(self, job: SageMakerJob, env: Mapping[str, str]) -> dict[str, HostAnswer]:
        """Ask all data hosts side by side, and return their answers by host.

        Args:
            job: The job: in another attempt, other hosts may serve.
            env: Environment variables of the job's processes, which may have its secret.
        """
        topology = Topology.from_job(job)
        hosts = topology.data_hosts
        port = job.hyperparameters.get(_PREFIX + "port") or topology.data_port
        addresses = [f"{job.addresses.get(host, host)}:{port}" for host in hosts]
        try:
            for address in addresses:
                if address not in self._channels:
                    self._channels[address] = GrpcChannel(address, _credentials(job, env))
        except (DataServiceError, JobConfigError) as error:
            return dict.fromkeys(hosts, HostAnswer(problem=str(error)))
        with ThreadPoolExecutor(max(1, len(hosts))) as threads:
            answers = threads.map(_answer, [self._channels[address] for address in addresses])
            return dict(zip(hosts, answers, strict=True))

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.close()


def _credentials(job: SageMakerJob, env: Mapping[str, str]) -> Credentials:
    token, certificate, key, authority = (unquoted(job.hyperparameters.get(_PREFIX + name)) for name in _SETTINGS)
    settings = DataServiceSettings(token=token, tls_certificate=certificate, tls_key=key, tls_authority=authority)
    return Credentials.of(settings, job.name or "unnamed", env)


def _answer(channel: GrpcChannel) -> HostAnswer:
    try:
        return HostAnswer(HostReport.parse(channel.unary("Status", b"{}", _ASK_S)))
    except WireError as error:
        return HostAnswer(problem=str(error))
    except CallError as error:
        if error.code in (CallStatus.UNAVAILABLE, CallStatus.DEADLINE_EXCEEDED):
            return HostAnswer(problem="does not answer")
        if error.code is CallStatus.UNAUTHENTICATED:
            return HostAnswer(problem="refuses the token: data_service.token is not among the hyperparameters")
        return HostAnswer(problem=error.details)
