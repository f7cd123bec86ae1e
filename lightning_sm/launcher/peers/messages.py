"""The messages between launchers: each asks the hub, on the main host, for the state of the job.

Each line consists of a MAC, computed with the job's key, and JSON, which is validated against its type. The hub begins
each connection with random text. The MAC of a request covers this text, and the MAC of an answer covers the MAC of its
request, so recorded messages cannot be replayed. The key is derived from the job's secret. In a job without a secret,
it is derived from the job's name, and only keeps apart jobs that share a network.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from lightning_sm._structs import Struct, encode
from lightning_sm.job.host_keys import job_key
from lightning_sm.job.outcomes import JobOutcome, Outcome
from lightning_sm.job.variables import JOB_SECRET
from lightning_sm.launcher.peers.outcome import Restart

# A reason of 1024 characters takes up to 7168 bytes, if each character is a surrogate, written as \\ud800. So does the
# reason's headline.
MAX_LINE_BYTES = 16 * 1024
_ANOTHER_KEY = f"its {JOB_SECRET.name} (or, without one, its job's name) differs from that of this host"

_T = TypeVar("_T", bound=Struct)


class Question(Struct, frozen=True):
    """A host's regular request for the state of the job, which also shows that the host is alive.

    Attributes:
        host: Name of the host.
        nonce: Random text, so that an answer to an earlier request cannot be replayed.
        attempt: How many restarts of the job preceded this start of the host's script.
        outcome: The outcome of the script; None while it runs.
    """

    host: str
    nonce: str
    attempt: int = 0
    outcome: Outcome | None = None


class Answer(Struct, frozen=True):
    """The state of the job.

    Attributes:
        restart: The last restart that was ordered, if any.
        job_outcome: The outcome of the job; None until it is known.
        is_over: Whether no host needs to wait for another.
        is_known: Whether all connected hosts know this state.
    """

    restart: Restart | None = None
    job_outcome: JobOutcome | None = None
    is_over: bool = False
    is_known: bool = False


def peers_key(job_identity: str, env: Mapping[str, str]) -> bytes:
    """Derive the key with which a job's launchers authenticate each other.

    Args:
        job_identity: The job's ARN or name.
        env: Environment variables, which may contain the job's secret.
    """
    return job_key("lightning-sm launchers", job_identity, env)


def to_line(message: Struct, key: bytes, covered: bytes) -> bytes:
    """Encode a message as a line.

    Args:
        message: The message.
        key: The job's key.
        covered: Additional input of the MAC: the hub's random text for a request, the MAC of the request for an answer.
    """
    text = encode(message)
    return b"%s %s\n" % (_mac(type(message), text, key, covered), text)


def from_line(line: bytes, kind: type[_T], key: bytes, covered: bytes) -> _T:
    """Return the message in a line that ``to_line`` made with the same ``key`` and ``covered``.

    Raises:
        ConnectionError: The line is incomplete, because the connection was closed or the line is too long.
        PermissionError: The MAC is wrong.
        msgspec.DecodeError: The line is not a message of this kind.
    """
    if not line.endswith(b"\n"):
        raise ConnectionError("it closed the connection")
    text = line[:-1].partition(b" ")[2]
    if not hmac.compare_digest(mac_of(line), _mac(kind, text, key, covered)):
        raise PermissionError(_ANOTHER_KEY)
    return msgspec.json.decode(text, type=kind)


def mac_of(line: bytes) -> bytes:
    """Return the MAC of a line."""
    return line.partition(b" ")[0]


def _mac(kind: type[Struct], text: bytes, key: bytes, covered: bytes) -> bytes:
    signed = b"\0".join((kind.__name__.encode(), covered, text))
    return hmac.new(key, signed, hashlib.sha256).hexdigest().encode()
