"""The status of a job's data hosts, by a call of the data service that grants no lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.protocol.calls import HostReport
from lightning_sm.data.settings import Credentials, DataServiceSettings
from lightning_sm.errors import WireError
from lightning_sm.job.facts import SageMakerJob
from lightning_sm.job.hyperparameters import unquoted
from lightning_sm.job.topology import Topology

_PREFIX = "data_service."
_SETTINGS = ("token", "tls_certificate", "tls_key", "tls_authority")


@dataclass(frozen=True)
class Answer:
    """The answer of a data host.

    Attributes:
        state: Its state, see ``HostReport``; None if it did not answer.
        problem: Why not.
    """

    state: Mapping[str, Any] | None = None
    problem: str = ""


class StatusPoller:
    """Connections to the data hosts of a job.

    Args:
        job: The job.
        env: Environment variables of the job's processes, which may have its secret.

    Raises:
        DataSettingsError: A hyperparameter of the data service is wrong.
    """

    def __init__(self, job: SageMakerJob, env: Mapping[str, str]) -> None:
        topology = Topology.from_job(job)
        token, certificate, key, authority = (unquoted(job.hyperparameters.get(_PREFIX + name)) for name in _SETTINGS)
        settings = DataServiceSettings(token=token, tls_certificate=certificate, tls_key=key, tls_authority=authority)
        port = job.hyperparameters.get(_PREFIX + "port") or topology.data_port
        credentials = Credentials.of(settings, job.name or "unnamed", env)
        self._metadata = grpc_transport.metadata(credentials)
        self._channels = {
            host: grpc_transport.open_channel(f"{job.addresses.get(host, host)}:{port}", credentials)
            for host in topology.data_hosts
        }

    def ask(self, timeout_s: float) -> dict[str, Answer]:
        """Ask all data hosts side by side, and return their answers by host."""
        method = grpc_transport.method("Status")
        asked = {
            host: channel.unary_unary(method).future(b"{}", metadata=self._metadata, timeout=timeout_s)
            for host, channel in self._channels.items()
        }
        return {host: _answer(call) for host, call in asked.items()}

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.close()


def _answer(call: Any) -> Answer:
    try:
        return Answer(asdict(HostReport.parse(call.result())))
    except WireError as error:
        return Answer(problem=str(error))
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return Answer(problem="does not answer")
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return Answer(problem="refuses the token: data_service.token is not among the hyperparameters")
        return Answer(problem=str(error.details()))
