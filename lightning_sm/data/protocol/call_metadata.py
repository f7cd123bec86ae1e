"""What every call from a trainer to a data host begins with: its method, and who calls. No gRPC library."""

from __future__ import annotations

from lightning_sm.data.settings import Credentials
from lightning_sm.job.variables import JOB_SECRET

PROTOCOL_VERSION = "1"
SERVICE = "lightning_sm.DataHost"

# Values of keys in "-bin" may be any bytes; other values must be ASCII, and lose leading and trailing blanks.
VERSION_KEY = "lightning-sm-protocol"
JOB_KEY = "lightning-sm-job-bin"
TOKEN_KEY = "lightning-sm-token-bin"  # noqa: S105  # the key, not the token


def method(name: str) -> str:
    """Return the full name of a method: "Open", "Load", "List", "Count", "Fetch", "Heartbeat", "Status" or "Finish"."""
    return f"/{SERVICE}/{name}"


def metadata(credentials: Credentials) -> list[tuple[str, str | bytes]]:
    """Return what a trainer sends with every call: protocol version, job and token."""
    return [
        (VERSION_KEY, PROTOCOL_VERSION),
        (JOB_KEY, credentials.job.encode()),
        (TOKEN_KEY, credentials.token.encode()),
    ]


def refused_token(credentials: Credentials) -> str:
    """Return advice about a token that a data host refuses; the data host itself tells strangers nothing."""
    return (
        f"the data host refused the token of this trainer, which belongs to job {credentials.job!r} and has its "
        f"token from {credentials.token_source}. Compare both hosts: they must be of the same job, and have the "
        f"same data_service.token, or none; the same {JOB_SECRET.name}, or none; and the same version of "
        f"lightning_sm. A DataHost makes a secret for its own process if there is none: to train in another one, "
        f"set the same {JOB_SECRET.name} in both"
    )
