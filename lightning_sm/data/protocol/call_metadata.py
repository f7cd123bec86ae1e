"""What every call from a trainer to a data host begins with: its method, who calls, and proofs of the token by both.

The token never crosses the network. With each call, a trainer sends a random number and a proof of the token, and the
data host begins its answer with a random number and a proof over both numbers. Nothing of an answer is read before.
Calls that bring pickles have a third part: their first request is a proof over both numbers, too, so that who has
recorded such a call cannot repeat it. No gRPC library.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from lightning_sm.data.settings import Credentials
from lightning_sm.job.variables import JOB_SECRET

PROTOCOL_VERSION = "2"
SERVICE = "lightning_sm.DataHost"

# Data hosts unpickle what these calls bring, a dataset or a DataModule and what samplers have yielded, so both sides
# must have proved the token first.
CONFIRMED = ("Load", "Fetch")

VERSION_KEY = "lightning-sm-protocol"
NONCE_KEY = "lightning-sm-nonce"
PROOF_KEY = "lightning-sm-proof"


def method(name: str) -> str:
    """Return the full name of a method, such as "Heartbeat"."""
    return f"/{SERVICE}/{name}"


def proof(credentials: Credentials, label: Literal["trainer", "data host", "confirmation"], *parts: str) -> str:
    """Return a proof of the token, which does not reveal it.

    Args:
        credentials: The token.
        label: What it proves. Otherwise one side could send back the proof of the other.
        parts: For a trainer, the full name of the method and its random number; else the random numbers of trainer and
            data host.
    """
    text = "\0".join((label, *parts))
    return hmac.new(credentials.token.encode(), text.encode(), hashlib.sha256).hexdigest()


def metadata(credentials: Credentials, name: str, nonce: str) -> list[tuple[str, str]]:
    """Return what a trainer sends with a call: protocol version, a random number and a proof of the token."""
    return [
        (VERSION_KEY, PROTOCOL_VERSION),
        (NONCE_KEY, nonce),
        (PROOF_KEY, proof(credentials, "trainer", method(name), nonce)),
    ]


def refused_token(credentials: Credentials) -> str:
    """Return advice about a token that a data host refuses; the data host itself tells strangers nothing."""
    return f"the data host refused the token of {_this_trainer(credentials)}"


def unproved(credentials: Credentials) -> str:
    """Return advice about a server that does not prove the token."""
    return (
        f"what answers there is not a data host of this job: it did not prove that it has the token of "
        f"{_this_trainer(credentials)}. If both have the same token, another process has taken the port: set "
        "data_service.port to a free one"
    )


def _this_trainer(credentials: Credentials) -> str:
    name = JOB_SECRET.name
    return (
        f"this trainer, which belongs to job {credentials.job!r} and has its token from {credentials.token_source}. "
        f"Compare both hosts: they must be of the same job, and have the same {name}, or none, and the same version of "
        "lightning_sm. A DataHost makes a secret for its own process if there is none: to train in another one, set "
        f"the same {name} in both"
    )
