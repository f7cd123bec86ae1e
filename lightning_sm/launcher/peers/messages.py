"""What launchers say to each other: each message is a line of JSON, which is checked against its type.

A host connects to the launcher of the main host, the hub. First each introduces itself and proves that it belongs to
the job, then they go on as the table says:

    host and hub   Greeting, Proof; then StillThere
    host           Report, for each run of its script; Acknowledge, once all may leave
    hub            OrderRestart; JobEnd, when the outcome is known, and again when all may leave
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from lightning_sm._structs import Struct, encode
from lightning_sm.job.stopping import JobOutcome, Outcome
from lightning_sm.launcher.peers.outcome import Restart

# The greetings stay the same in all versions, so that launchers of different versions can say so.
PROTOCOL = 6

_T = TypeVar("_T")


class Greeting(msgspec.Struct, frozen=True):
    """The first line of both; what other versions add to it is ignored.

    Attributes:
        protocol: Version of the other messages; None: the other end is not a launcher.
        nonce: Random text for the proofs.
        host: Name of the host; empty: it is the hub.
    """

    protocol: int | None = None
    nonce: str = ""
    host: str = ""


class PeerMessage(Struct, frozen=True, tag=True):
    """Base of the other lines, which name their kind."""


class Proof(PeerMessage, frozen=True):
    """A MAC of both greetings with the key of the job; empty: the proof of the other end was wrong."""

    mac: str


class StillThere(PeerMessage, frozen=True):
    """A sign of life."""


class Report(PeerMessage, frozen=True):
    """A host's script has ended.

    Attributes:
        attempt: After how many restarts of the job it was started.
        outcome: The outcome of the script.
    """

    attempt: int
    outcome: Outcome


class Acknowledge(PeerMessage, frozen=True):
    """The host knows how the job has ended, and leaves."""


class OrderRestart(PeerMessage, frozen=True):
    """All trainer hosts end their scripts, and start them again when they may."""

    restart: Restart


class JobEnd(PeerMessage, frozen=True):
    """The outcome of the job.

    Attributes:
        outcome: The outcome.
        is_over: Whether no host needs to wait for another one.
    """

    outcome: JobOutcome
    is_over: bool = False


AnyMessage = Proof | StillThere | Report | Acknowledge | OrderRestart | JobEnd
_GREETING = msgspec.json.Decoder(Greeting)
_MESSAGE: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(AnyMessage)


def to_line(message: Greeting | AnyMessage) -> bytes:
    """Return a message as a line."""
    return encode(message) + b"\n"


def parse_greeting(line: bytes) -> Greeting:
    """Rebuild a greeting.

    Raises:
        ValueError: The line is none.
    """
    return _parse(line, _GREETING)


def parse_message(line: bytes) -> AnyMessage:
    """Rebuild any message but a greeting.

    Raises:
        ValueError: The line is none.
    """
    return _parse(line, _MESSAGE)


def _parse(line: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise ValueError(f"it sent a line that no launcher sends: {error}") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise ValueError("it sent a line that is not JSON") from None
