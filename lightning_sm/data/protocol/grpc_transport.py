"""The protocol between trainers and data hosts: gRPC methods, frames, limits, credentials.

gRPC carries raw bytes, no protobuf, which is three times slower. A batch travels as frames on one two-way stream per
trainer rank and data host: the trainer sends requests ahead, the data host answers in the order in which batches are
finished, in pieces of 2 MiB, which were measured to be the fastest and keep messages small.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import grpc

from lightning_sm.data.protocol.spec import CHUNK_BYTES
from lightning_sm.data.protocol.tls import read_tls
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import DataSettingsError, WireError

PROTOCOL_VERSION = "1"
SERVICE = "lightning_sm.DataHost"

# Headers hold the structure of a batch, and its strings.
MAX_HEADER_BYTES = 64 << 20

_FRAME = struct.Struct("<IBxxxQII")
FRAME_BYTES = _FRAME.size
_BATCH = struct.Struct("<Qdd")
MAX_STRUCTURE_BYTES = MAX_HEADER_BYTES - _BATCH.size

# Values under names in "-bin" may be any bytes; others must be ASCII, and lose the blanks around them.
_VERSION_KEY, _JOB_KEY, _TOKEN_KEY = "lightning-sm-protocol", "lightning-sm-job-bin", "lightning-sm-token-bin"


class FrameKind(IntEnum):
    """What a frame holds."""

    FETCH = 1  # an encoded BatchSpec
    CANCEL = 2  # nothing: the answer is not wanted any more
    HEADER = 3  # total bytes, timings, structure of the batch
    DATA = 4  # bytes of the batch; the value is their offset
    FAILURE = 5  # JSON: why there is no batch
    COMPRESSED = 6  # the same as DATA, but compressed


def frame(request_id: int, kind: FrameKind, size: int = 0, value: int = 0) -> bytes:
    """Return the head of a frame, which its payload follows.

    Args:
        request_id: Number that the trainer gave to the request.
        kind: What the payload is.
        size: Bytes of the payload.
        value: Meaning depends on the kind.
    """
    return _FRAME.pack(request_id, kind, value, size, 0)


def frames(message: bytes) -> Iterator[tuple[int, int, int, memoryview]]:
    """Take a message apart.

    Args:
        message: One or more frames.

    Yields:
        Request id, kind, value, payload.

    Raises:
        WireError: The message ends inside a frame.
    """
    view, position = memoryview(message), 0
    while position < len(view):
        if len(view) - position < FRAME_BYTES:
            raise WireError(f"A message of {len(view)} bytes ends inside the head of a frame.")
        request_id, kind, value, size, _ = _FRAME.unpack_from(view, position)
        position += FRAME_BYTES
        if size > len(view) - position:
            raise WireError(f"A frame of {size} bytes ends after {len(view) - position} bytes.")
        yield request_id, kind, value, view[position : position + size]
        position += size


def batch_head(num_bytes: int, queue_s: float, produce_s: float) -> bytes:
    """Return what precedes the structure in a HEADER frame.

    Args:
        num_bytes: Bytes of data that follow in DATA frames.
        queue_s: Seconds that the request waited for a worker.
        produce_s: Seconds that the worker took.
    """
    return _BATCH.pack(num_bytes, queue_s, produce_s)


def parse_header(payload: memoryview) -> tuple[int, float, float, bytes]:
    """Take the payload of a HEADER frame apart.

    Args:
        payload: The payload.

    Raises:
        WireError: It is too short or too long.

    Returns:
        Bytes of data, queue seconds, produce seconds, structure.
    """
    if not _BATCH.size <= len(payload) <= MAX_HEADER_BYTES:
        raise WireError(f"The header of a batch has {len(payload)} bytes; at most {MAX_HEADER_BYTES} are allowed.")
    num_bytes, queue_s, produce_s = _BATCH.unpack_from(payload)
    return num_bytes, queue_s, produce_s, bytes(payload[_BATCH.size :])


def method(name: str) -> str:
    """Return the full name of a method of the service.

    Args:
        name: "Open", "List", "Fetch", "Beat" or "Finish".
    """
    return f"/{SERVICE}/{name}"


def metadata(credentials: Credentials) -> list[tuple[str, str | bytes]]:
    """Return what a trainer sends with every call.

    Args:
        credentials: Job and token.
    """
    return [
        (_VERSION_KEY, PROTOCOL_VERSION),
        (_JOB_KEY, credentials.job.encode()),
        (_TOKEN_KEY, credentials.token.encode()),
    ]


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no type information
    """Refuses calls of another version, of another job, or without the token, before anything is read.

    Args:
        credentials: Job and token.
        host: Name of this host, for messages.
    """

    def __init__(self, credentials: Credentials, host: str) -> None:
        self._credentials = credentials
        self._host = f"data host {host}" if host else "the data host"

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Let a call through, or answer it with the reason why not."""
        told = dict(details.invocation_metadata)
        handler = continuation(details)
        refusal = self._refusal(told)
        if refusal is None:
            return handler
        code, text = refusal

        def refuse(_: Any, context: Any) -> Any:
            context.abort(code, text)

        # Another version may have other methods; those of none are refused, too.
        is_stream = handler is not None and handler.response_streaming
        kind = grpc.stream_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
        return kind(refuse)

    def _refusal(self, told: dict[str, Any]) -> tuple[Any, str] | None:
        version, job, token = told.get(_VERSION_KEY), told.get(_JOB_KEY, b""), told.get(_TOKEN_KEY, b"")
        if version != PROTOCOL_VERSION:
            return grpc.StatusCode.FAILED_PRECONDITION, (
                f"{self._host} speaks version {PROTOCOL_VERSION} of the protocol, this trainer {version}. "
                "Use the same version of lightning_sm on all hosts."
            )
        if job != self._credentials.job.encode():
            return grpc.StatusCode.FAILED_PRECONDITION, (
                f"{self._host} belongs to job {self._credentials.job!r}, this trainer to job "
                f"{job.decode(errors='replace')!r}."
            )
        # Constant time, so that the answer's delay tells nothing about the token.
        if not hmac.compare_digest(token, self._credentials.token.encode()):
            return grpc.StatusCode.UNAUTHENTICATED, (
                f"{self._host} does not know this trainer's token. Set the same data_service.token on all hosts."
            )
        return None


def channel_options() -> list[tuple[str, Any]]:
    """Return the options of a trainer's connection."""
    return [
        *_common_options(),
        # One connection per channel: ranks of one process would share one otherwise.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> list[tuple[str, Any]]:
    """Return the options of a data host's server."""
    return [
        *_common_options(),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _common_options() -> list[tuple[str, Any]]:
    # A window that holds several pieces, fixed: probing for it cost up to a quarter of the rate on a fast network.
    return [
        # The largest header and the first piece, with the small answers that a data host sends together with them.
        ("grpc.max_receive_message_length", MAX_HEADER_BYTES + CHUNK_BYTES + (1 << 20)),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.max_frame_size", 16777215),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 16 << 20),
    ]


def open_channel(address: str, credentials: Credentials) -> Any:
    """Return a channel to a data host; it connects when it is used.

    Args:
        address: ``host:port``, or ``unix:path``.
        credentials: TLS files, if any. The certificate of the data host must be for the name or address in
            ``address`` (a SubjectAlternativeName); for ``unix:path`` that is ``localhost``.

    Raises:
        DataSettingsError: A TLS file is wrong.
    """
    files = read_tls(credentials)
    if files is None:
        return grpc.insecure_channel(address, options=channel_options())
    is_mutual = files.authority is not None
    tls = grpc.ssl_channel_credentials(
        root_certificates=files.authority or files.certificate,
        private_key=files.key if is_mutual else None,
        certificate_chain=files.certificate if is_mutual else None,
    )
    # gRPC would look for the path of the socket in the certificate.
    name = [("grpc.ssl_target_name_override", "localhost")] if address.startswith("unix:") else []
    return grpc.secure_channel(address, tls, options=[*channel_options(), *name])


def bind(server: Any, address: str, credentials: Credentials) -> str:
    """Let a server listen.

    Args:
        server: The server.
        address: ``host:port`` (port 0: any), or ``unix:path``.
        credentials: TLS files, if any.

    Raises:
        DataSettingsError: The address cannot be listened on, or a TLS file is wrong.

    Returns:
        The address with the port that was taken.
    """
    files = read_tls(credentials)
    try:
        if files is None:
            port = server.add_insecure_port(address)
        else:
            pairs, is_mutual = [(files.key, files.certificate)], files.authority is not None
            tls = grpc.ssl_server_credentials(pairs, files.authority, require_client_auth=is_mutual)
            port = server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise DataSettingsError(
            f"The data host cannot listen on {address} ({error}). Another process may have the port: set "
            "data_service.port."
        ) from error
    return address if address.startswith("unix") else f"{address.rpartition(':')[0]}:{port}"
