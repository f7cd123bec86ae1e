"""Hand-made ends of the protocol: data hosts with the answers, and trainers with the requests, that a test wants."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from secrets import token_hex
from typing import Any

import grpc

from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.protocol.call_metadata import CONFIRMED, NONCE_KEY, SERVICE, metadata, method, proof
from lightning_sm.data.protocol.frames import FrameKind, frames
from lightning_sm.data.protocol.openings import OpeningsReply
from lightning_sm.data.settings import Credentials, DataServiceSettings

# Clients may send messages of any length, and each has a separate connection.
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def credentials(job: str = LOCAL_JOB, **settings: Any) -> Credentials:
    """Return the credentials of hosts and trainers with these settings."""
    return Credentials.of(DataServiceSettings(**settings), job)


class FakeHost:
    """A data host that answers correctly, unless a test replaces an answer.

    Attributes:
        heartbeat: Answer to Heartbeat.
        opened: Answer to OpenSources; None: all requested sources are open.
        answer: Returns the messages that answer a request for a batch.
        loaded: The messages received by Load.
    """

    def __init__(self, answer: Callable[[int], list[bytes]] | None = None) -> None:
        self.heartbeat = json.dumps({"host": {"name": "fake", "workers": 2}}).encode()
        self.opened: bytes | None = None
        self.answer = answer
        self.loaded: list[bytes] = []

    @contextlib.contextmanager
    def serving(
        self, known: Credentials | None = None, where: str = "127.0.0.1:0", guard: grpc_transport.Guard | None = None
    ) -> Iterator[str]:
        """Serve in this process, and yield the address.

        Args:
            known: Job, token and TLS files.
            where: Where to listen.
            guard: Replaces the guard of a data host.
        """
        known = known or credentials()
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            "Heartbeat": unary(lambda *_: self.heartbeat),
            "OpenSources": unary(lambda request, _: self.open(request)),
            "Load": grpc.stream_unary_rpc_method_handler(lambda requests, _: self.loaded.extend(requests) or b"{}"),
            "Fetch": stream(self._fetch),
        }
        with ThreadPoolExecutor(8) as pool:
            server = grpc.server(
                pool,
                handlers=[grpc.method_handlers_generic_handler(SERVICE, handlers)],
                interceptors=[guard or grpc_transport.Guard(known, "fake")],
                options=grpc_transport.server_options(),
            )
            address = grpc_transport.bind(server, where, known)
            server.start()
            try:
                yield address
            finally:
                server.stop(None).wait()  # with 0 seconds of grace, a gRPC thread may outlive it

    def open(self, request: bytes) -> bytes:
        """Return the answer to OpenSources."""
        wanted = json.loads(request)["openings"]
        return self.opened or OpeningsReply([one["name"] for one in wanted], []).encode()

    def _fetch(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for message in requests:
            for request_id, kind, _, _ in frames(message):
                if kind == FrameKind.FETCH:
                    yield from self.answer(request_id)


class Impostor(grpc_transport.Guard):
    """A guard that accepts every call and does not prove that it has the token.

    Args:
        token: A wrong token for its proof; None: it sends no proof.
        only: The only method that it takes over; a data host's guard handles the others. Default: all methods.

    Attributes:
        called: Names of the methods that were called.
    """

    def __init__(self, token: str | None = None, only: str | None = None) -> None:
        super().__init__(replace(credentials(), token=token or ""), "fake")
        self.called: set[str] = set()
        self._proves = token is not None
        self._only = only
        self._right = grpc_transport.Guard(credentials(), "fake")

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Accept a call."""
        name = details.method.rpartition("/")[2]
        self.called.add(name)
        if name != (self._only or name):
            return self._right.intercept_service(continuation, details)
        return super().intercept_service(continuation, details) if self._proves else continuation(details)

    def _refusal(self, path: str, sent: dict[str, Any]) -> tuple[Any, str] | None:
        return None


def begin(channel: grpc.Channel, name: str, requests: Iterator[bytes], **limits: Any) -> Any:
    """Start a call by hand, as a trainer with the token does, and return it.

    Args:
        channel: Channel of grpcio.
        name: Name of the method.
        requests: Requests to send: one, unless the method accepts more.
        limits: Timeout and other options of the call.
    """
    known, nonce, started = credentials(), token_hex(16), Future()
    limits["metadata"] = metadata(known, name, nonce)

    def all_requests() -> Iterator[bytes]:
        if name in CONFIRMED:
            challenge = dict(started.result().initial_metadata()).get(NONCE_KEY, "")
            yield proof(known, "confirmation", nonce, challenge).encode()
        yield from requests

    if name == "Fetch":
        call = channel.stream_stream(method(name))(all_requests(), **limits)
    elif name == "Load":
        call = channel.stream_unary(method(name)).future(all_requests(), **limits)
    else:
        call = channel.unary_unary(method(name)).future(next(requests), **limits)
    started.set_result(call)
    return call


class FakeTrainer:
    """Calls a data host by hand, with grpcio.

    Args:
        address: The data host.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)

    def __enter__(self) -> FakeTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, name: str, request: bytes = b"{}") -> bytes:
        """Make a call with one request and one answer."""
        return begin(self._channel, name, iter([request]), timeout=20).result()

    def wait_until_served(self) -> None:
        """Reconnect until a call is answered: a server with too many connections closes new ones."""
        begin(self._channel, "Status", iter([b"{}"]), timeout=60, wait_for_ready=True).result()

    def stream(self, name: str, *requests: bytes) -> list[bytes]:
        """Make a call with any number of requests, and return all answers."""
        return list(begin(self._channel, name, iter(requests), timeout=20))

    def any_call(self, name: str, request: bytes = b"{}") -> grpc.StatusCode:
        """Make a call, and return its status code."""
        try:
            if name in ("Fetch", "List"):
                self.stream(name, request)
            else:
                self.call(name, request)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def conversation(self, requests: Iterator[bytes]) -> Any:
        """Open a Fetch stream, and return the call."""
        return begin(self._channel, "Fetch", requests, timeout=60)
