"""Outcomes of calls, as gRPC status codes. No gRPC library."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from urllib.parse import unquote


class CallStatus(IntEnum):
    """The status codes of gRPC (``doc/statuscodes.md`` of github.com/grpc/grpc)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_FINAL = (
    CallStatus.UNAUTHENTICATED,
    CallStatus.PERMISSION_DENIED,
    CallStatus.FAILED_PRECONDITION,
    CallStatus.INVALID_ARGUMENT,
)


class CallError(Exception):
    """The error of a call that did not end with status OK.

    ``__cause__``, if set, is the error that ended the connection.

    Args:
        code: The status.
        details: The reason, for messages.
    """

    def __init__(self, code: CallStatus, details: str) -> None:
        super().__init__(f"{code.name.lower().replace('_', ' ')} ({details})")
        self.code = code
        self.details = details

    @property
    def is_final(self) -> bool:
        """Whether a retry cannot succeed."""
        return self.code in _FINAL


def response_error(headers: Mapping[bytes, bytes]) -> CallError | None:
    """Return an error if the headers are not those of a gRPC response (``PROTOCOL-HTTP2.md``, "Responses").

    Args:
        headers: Headers of the response.
    """
    status = headers.get(b":status", b"")
    kind = headers.get(b"content-type", b"")
    if status == b"200" and kind.startswith(b"application/grpc"):
        return None
    text = f"the answer has HTTP status {status.decode('latin-1')} and type {kind.decode('latin-1')!r}"
    return CallError(CallStatus.UNKNOWN, text)


def error_in(trailers: Mapping[bytes, bytes]) -> CallError | None:
    """Return the error in the trailers, or None if the call succeeded."""
    try:
        code = CallStatus(int(trailers.get(b"grpc-status", b"")))
    except ValueError:
        return CallError(CallStatus.UNKNOWN, f"the answer ends with status {trailers.get(b'grpc-status')!r}")
    # Status-Message is percent-encoded, and decoding it must not fail (PROTOCOL-HTTP2.md).
    details = unquote(trailers.get(b"grpc-message", b"").decode("latin-1"), errors="replace")
    return None if code is CallStatus.OK else CallError(code, details)
