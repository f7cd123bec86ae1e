"""The trainer's gRPC client, which calls a data host."""

from __future__ import annotations

import hmac
import ssl
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from secrets import token_hex

from lightning_sm.data.protocol.call_metadata import (
    CONFIRMED,
    NONCE_KEY,
    PROOF_KEY,
    metadata,
    method,
    proof,
    refused_token,
    unproved,
)
from lightning_sm.data.protocol.grpc_call import Call, MessageReceiver
from lightning_sm.data.protocol.grpc_status import CallError, CallStatus
from lightning_sm.data.protocol.h2_connection import Http2Connection
from lightning_sm.data.protocol.tls import client_context
from lightning_sm.data.settings import Credentials


class _AnswerBuffer:
    """A buffer for an answer that consists of one message."""

    def __init__(self) -> None:
        self.message: bytearray | None = None
        self.error: Exception | None = None
        self.ended = threading.Event()
        self._rest = memoryview(b"")

    def begin(self, num_bytes: int) -> None:
        """Make room for a message."""
        if self.message is not None:
            raise CallError(CallStatus.INTERNAL, "the server sent a second answer")
        self.message = bytearray(num_bytes)
        self._rest = memoryview(self.message)

    def memory(self) -> memoryview:
        """Return the rest of the message."""
        return self._rest

    def advance(self, num_bytes: int) -> None:
        """Skip the bytes that were written."""
        self._rest = self._rest[num_bytes:]

    def end(self, error: Exception | None) -> None:
        """Wake the waiting thread."""
        self.error = error
        self.ended.set()


class GrpcChannel:
    """A channel to a data host, which connects on the first call, and reconnects on the first call after a loss.

    Args:
        address: ``host:port``.
        credentials: Job, token and TLS files. The data host's certificate must be valid for the name or address in
            ``address`` (SubjectAlternativeName).
        context: TLS settings of another channel; if None, they are read from the TLS files.

    Raises:
        DataSettingsError: A TLS file is invalid.
    """

    def __init__(self, address: str, credentials: Credentials, context: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._credentials = credentials
        self.context = client_context(credentials) if context is None else context
        self._lock = threading.Lock()
        self._connection: Http2Connection | None = None
        self._is_closed = False

    def open(
        self, name: str, receiver: MessageReceiver, requests: Iterable[bytes] | None, timeout_s: float | None = None
    ) -> Call:
        """Start a call.

        Args:
            name: Name of the method.
            receiver: Receives the answers.
            requests: All requests; None if ``send`` adds them.
            timeout_s: Seconds after which the server cancels the call.

        Raises:
            CallError: The channel is closed.
        """
        nonce = token_hex(16)
        confirm = partial(_confirm, self._credentials, nonce)
        call = Call(self._headers(name, nonce, timeout_s), receiver, requests, confirm, waits=name in CONFIRMED)
        with self._lock:
            if self._is_closed:
                raise CallError(CallStatus.CANCELLED, "the channel is closed")
            if self._connection is None or not self._connection.start(call):
                self._connection = Http2Connection(self._address, self.context, call)
        return call

    def unary(self, name: str, request: bytes, timeout_s: float) -> bytes:
        """Make a call with one request and one answer.

        Raises:
            CallError: The call failed or took too long.
            WireError: The answer is malformed.
        """
        return self.stream_unary(name, [request], timeout_s)

    def stream_unary(self, name: str, requests: Iterable[bytes], timeout_s: float) -> bytes:
        """Make a call with any number of requests and one answer; it raises the same errors as ``unary``."""
        answer = _AnswerBuffer()
        call = self.open(name, answer, requests, timeout_s)
        if not answer.ended.wait(timeout_s):
            call.cancel()
            raise CallError(CallStatus.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s")
        if isinstance(answer.error, CallError) and answer.error.code is CallStatus.UNAUTHENTICATED:
            raise CallError(CallStatus.UNAUTHENTICATED, refused_token(self._credentials))
        if answer.error is not None:
            raise answer.error
        if answer.message is None:
            raise CallError(CallStatus.INTERNAL, "the server sent no answer")
        return bytes(answer.message)

    def close(self) -> None:
        """End all calls and close the connection."""
        with self._lock:
            self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    def _headers(self, name: str, nonce: str, timeout_s: float | None) -> list[tuple[str, str]]:
        """Return the headers of a call (PROTOCOL-HTTP2.md, "Request-Headers")."""
        scheme = "http" if self.context is None else "https"
        headers = [(":method", "POST"), (":scheme", scheme), (":path", method(name)), (":authority", self._address)]
        headers += [("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "grpc-lightning-sm")]
        if timeout_s is not None:  # at most 8 digits
            headers.append(("grpc-timeout", f"{min(99_999_999, max(1, int(1000 * timeout_s)))}m"))
        return headers + metadata(self._credentials, name, nonce)


def _confirm(credentials: Credentials, nonce: str, headers: Mapping[bytes, bytes]) -> bytes:
    """Check the data host's proof in the headers of the answer, and return the proof that confirms the call.

    Raises:
        CallError: The headers do not prove that the data host has the token.
    """
    challenge = headers.get(NONCE_KEY.encode(), b"").decode("latin-1")
    expected = proof(credentials, "data host", nonce, challenge).encode()
    if not hmac.compare_digest(headers.get(PROOF_KEY.encode(), b""), expected):
        # Not UNAUTHENTICATED, with which data hosts refuse a trainer's token.
        raise CallError(CallStatus.PERMISSION_DENIED, unproved(credentials))
    return proof(credentials, "confirmation", nonce, challenge).encode()
