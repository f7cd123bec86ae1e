"""The gRPC server of a data host: options and credentials.

gRPC carries raw bytes, because protobuf is three times slower. Batches travel as frames on one bidirectional stream per
trainer rank and data host. The trainer sends requests ahead, and the data host answers in the order in which batches
are finished, in pieces of 2 MiB, which were fastest in measurements and keep messages small.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from secrets import token_hex
from typing import Any

import grpc

from lightning_sm.data.protocol.call_metadata import (
    CONFIRMED,
    NONCE_KEY,
    PROOF_KEY,
    PROTOCOL_VERSION,
    SERVICE,
    VERSION_KEY,
    method,
    proof,
)
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataSettingsError
from lightning_sm.job.variables import JOB_SECRET

logger = logging.getLogger(__name__)

# A request for a batch takes 8 bytes per sample, and one message may have the requests for a whole window.
MAX_REQUESTS_BYTES = 64 << 20

# Each rank occupies one thread with its stream, and another during a short call. Threads are created on demand. Calls
# beyond this limit could wait forever for a thread, so they are refused, and the trainer retries.
_MAX_THREADS = 2048

# A trainer rank has one stream for batches and a few short calls.
_MAX_STREAMS = 16
# A trainer sends a heartbeat at least every 10 s, so its connection is never idle for this long.
_IDLE_TIMEOUT_MS = 60_000
_HANDSHAKE_TIMEOUT_MS = 10_000

_WRONG_TOKEN = grpc.StatusCode.UNAUTHENTICATED, "wrong token"
_MAX_LOGGED = 20


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no type information
    """An interceptor that refuses calls without a proof of the token, or from another version, without reading them.

    A caller without the token is told nothing else, because the default token is derived from the job's name. Other
    callers first receive the server's proof.

    Args:
        credentials: Job and token.
        host: Name of this host, for messages.
    """

    def __init__(self, credentials: Credentials, host: str) -> None:
        self._credentials = credentials
        self._host = f"data host {host}" if host else "the data host"
        self._logged: set[str] = set()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Accept a call, or abort it with the reason."""
        sent = dict(details.invocation_metadata)
        refusal = self._refusal(details.method, sent)
        if refusal is None:
            handler = continuation(details)
            return handler and self._proving(handler, details.method, sent.get(NONCE_KEY, ""))
        # Refuse every method this way, even unknown ones: a handler for a single request would read the request first.
        return grpc.stream_stream_rpc_method_handler(lambda _, context: self._refuse(context, *refusal))

    def _proving(self, handler: Any, path: str, nonce: str) -> Any:
        """Return a handler that first proves the token and, for calls with pickles, demands the caller's proof."""
        kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
        serve = getattr(handler, kind)
        is_confirmed = path in map(method, CONFIRMED)

        def prove(request: Any, context: Any) -> Any:
            challenge = token_hex(16)
            host_proof = proof(self._credentials, "data host", nonce, challenge)
            context.send_initial_metadata(((NONCE_KEY, challenge), (PROOF_KEY, host_proof)))
            if is_confirmed:
                expected = proof(self._credentials, "confirmation", nonce, challenge)
                if not hmac.compare_digest(next(request, b""), expected.encode()):
                    self._refuse(context, *_WRONG_TOKEN)
            return serve(request, context)

        return handler._replace(**{kind: prove})

    def _refuse(self, context: Any, code: Any, why: str) -> None:
        address = context.peer().rpartition(":")[0]
        if code is grpc.StatusCode.UNAUTHENTICATED and address not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(address)
            logger.warning(
                "Refused a call from %s, which did not prove that it has the token of %s (job %r, token from %s). If "
                "it is a trainer of this job, compare %s on both sides.",
                address,
                self._host,
                self._credentials.job,
                self._credentials.token_source,
                JOB_SECRET.name,
            )
        context.abort(code, why)

    def _refusal(self, path: str, sent: dict[str, Any]) -> tuple[Any, str] | None:
        # Compare in constant time, so that the duration reveals nothing about the expected proof.
        expected = proof(self._credentials, "trainer", path, sent.get(NONCE_KEY, ""))
        if not hmac.compare_digest(sent.get(PROOF_KEY, "").encode(), expected.encode()):
            return _WRONG_TOKEN
        version = sent.get(VERSION_KEY)
        if version != PROTOCOL_VERSION:
            return grpc.StatusCode.FAILED_PRECONDITION, (
                f"{self._host} speaks version {PROTOCOL_VERSION} of the protocol, this trainer version {version}. "
                "Install the same version of lightning_sm on all hosts."
            )
        return None


def _kind(streams: bool) -> str:
    return "stream" if streams else "unary"


def server_options(max_connections: int = 1024, *, shares_port: bool = False) -> list[tuple[str, Any]]:
    """Return the options of a data host's server.

    Args:
        max_connections: Maximum number of open connections; gRPC closes any others.
        shares_port: Whether another socket of this process listens on the same port.
    """
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_frame_size", 16777215),
        ("grpc.http2.bdp_probe", 0),
        # Untrusted clients share the threads with trainers, so limit how many each connection can occupy.
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", _IDLE_TIMEOUT_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_receive_message_length", MAX_REQUESTS_BYTES),
        # Limit how much of a request is received before a handler reads it, which it never does without the token.
        ("grpc.http2.lookahead_bytes", 1 << 20),
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def make_server(
    handlers: Mapping[str, Any], credentials: Credentials, name: str, max_connections: int, *, shares_port: bool
) -> Any:
    """Return a gRPC server that has not been started.

    Args:
        handlers: The handlers by method name.
        credentials: Job and token.
        name: Name of the host, for messages.
        max_connections: Maximum number of open connections.
        shares_port: Whether another socket of this process listens on the same port.
    """
    return grpc.server(
        ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="grpc"),
        handlers=[grpc.method_handlers_generic_handler(SERVICE, handlers)],
        interceptors=[Guard(credentials, name)],
        options=server_options(max_connections, shares_port=shares_port),
        maximum_concurrent_rpcs=_MAX_THREADS,
    )


def bind(server: Any, address: str, credentials: Credentials) -> str:
    """Make a server listen on an address.

    Args:
        server: The gRPC server.
        address: ``host:port``; with port 0, the system chooses one.
        credentials: TLS files, if any.

    Raises:
        DataSettingsError: The server cannot listen on the address, or a TLS file is invalid.

    Returns:
        The address with the actual port.
    """
    files = read_tls(credentials)
    try:
        if files is None:
            port = server.add_insecure_port(address)
        else:
            pairs = [(files.key, files.certificate)]
            is_mutual = files.authority is not None
            tls = grpc.ssl_server_credentials(pairs, files.authority, require_client_auth=is_mutual)
            port = server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise cannot_listen(address, error) from error
    return f"{address.rpartition(':')[0]}:{port}"


def cannot_listen(address: str, error: Exception) -> DataSettingsError:
    """Return the error of a data host that cannot listen on its address."""
    return DataSettingsError(
        f"The data host cannot listen on {address} ({error}). If another process is using the port, set "
        "data_service.port to a free one."
    )
