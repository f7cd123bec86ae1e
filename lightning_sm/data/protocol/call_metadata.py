"""Metadata of every call from a trainer to a data host: method, caller, and mutual proofs of the token.

The token never crosses the network. With each call, a trainer sends a random number and a proof of the token. The data
host begins its answer with its own random number and a proof over both numbers; the trainer checks it before it reads
on. Calls that carry pickles need a third proof: their first request also proves the token over both numbers, so that a
recorded call cannot be replayed. No gRPC library.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from lightning_sm.data.settings import Credentials
from lightning_sm.job.variables import JOB_SECRET

PROTOCOL_VERSION = "3"
SERVICE = "lightning_sm.DataHost"

# Data hosts unpickle the payload of these calls (datasets, DataModules, sampler output), so both sides must prove the
# token first.
CONFIRMED = ("Load", "Fetch")

VERSION_KEY = "lightning-sm-protocol"
NONCE_KEY = "lightning-sm-nonce"
PROOF_KEY = "lightning-sm-proof"


def method(name: str) -> str:
    """Return the full name of a method, given its short name, such as "Heartbeat"."""
    return f"/{SERVICE}/{name}"


def proof(credentials: Credentials, label: Literal["trainer", "data host", "confirmation"], *parts: str) -> str:
    """Return a proof of the token, which does not reveal it.

    Args:
        credentials: The token.
        label: Who proves the token, so that neither side can send back the other's proof.
        parts: For label "trainer", the full name of the method and the trainer's random number; otherwise, the random
            numbers of the trainer and the data host.
    """
    text = "\0".join((label, *parts))
    return hmac.new(credentials.token.encode(), text.encode(), hashlib.sha256).hexdigest()


def metadata(credentials: Credentials, name: str, nonce: str) -> list[tuple[str, str]]:
    """Return a trainer's metadata for a call: protocol version, random number, and proof of the token."""
    return [
        (VERSION_KEY, PROTOCOL_VERSION),
        (NONCE_KEY, nonce),
        (PROOF_KEY, proof(credentials, "trainer", method(name), nonce)),
    ]


def refused_token(credentials: Credentials) -> str:
    """Return advice about a token that a data host refused; the host itself tells an untrusted client nothing."""
    return f"the data host refused the token of {_this_trainer(credentials)}"


def unproved(credentials: Credentials) -> str:
    """Return advice about a server that has not proved that it knows the token."""
    return (
        f"the server at this address is not a data host of this job: it did not prove that it has the token of "
        f"{_this_trainer(credentials)}. If the tokens are the same, another process uses the port: set "
        "data_service.port to a free one"
    )


def _this_trainer(credentials: Credentials) -> str:
    name = JOB_SECRET.name
    return (
        f"this trainer, which belongs to job {credentials.job!r} and has its token from {credentials.token_source}. "
        f"Compare both hosts: they must belong to the same job, and have the same version of lightning_sm and the same "
        f"{name}, or none. Without one, a DataHost makes a secret for its process: to train in another process, set "
        f"the same {name} in both"
    )
