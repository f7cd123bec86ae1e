"""Hand-made ends of the protocol: data hosts that answer what a test wants, and trainers that say what it wants."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from lightning_sm.data.host.data_host import LOCAL_JOB
from lightning_sm.data.protocol import call_metadata, grpc_transport
from lightning_sm.data.protocol.calls import Loaders, SetUp
from lightning_sm.data.protocol.frames import FrameKind, frames
from lightning_sm.data.protocol.spec import LoaderDescription
from lightning_sm.data.settings import Credentials, DataServiceSettings

LOADER = LoaderDescription(
    name="train_dataloader()",
    order="sequential",
    num_samples=8,
    batch_size=4,
    drop_last=False,
    fingerprint="f",
    identity="i",
    dataset="Fake of 8",
)


# A client's messages are as long as it likes, and each has a connection of its own.
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def credentials(job: str = LOCAL_JOB, **settings: Any) -> Credentials:
    """Return what hosts and trainers with these settings use."""
    return Credentials.of(DataServiceSettings(**settings), job)


class FakeHost:
    """A data host whose answers are right, unless a test replaces them.

    Attributes:
        heartbeat: Answer to Heartbeat.
        opened: Answers to Open: of ``setup``, and of loaders.
        listed: Answer to List.
        answer: Makes the messages that answer a request for a batch.
    """

    def __init__(self, answer: Callable[[int], list[bytes]] | None = None, loader: LoaderDescription = LOADER) -> None:
        self.heartbeat = json.dumps({"name": "fake", "workers": 2, "busy": 0, "queued": 0}).encode()
        self.opened = {"": SetUp({}, []).encode(), "train": Loaders(0, [loader]).encode()}
        self.listed = b""
        self.answer = answer

    @contextlib.contextmanager
    def serving(self, known: Credentials | None = None, where: str = "127.0.0.1:0") -> Iterator[str]:
        """Serve in this process, and yield the address."""
        known = known or credentials()
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        handlers = {
            "Heartbeat": unary(lambda *_: self.heartbeat),
            "Open": unary(lambda request, _: self.opened[json.loads(request)["loaders"]]),
            "List": stream(lambda *_: iter([self.listed])),
            "Fetch": stream(self._fetch),
            "Finish": unary(lambda *_: b"{}"),
        }
        with ThreadPoolExecutor(8) as pool:
            server = grpc.server(
                pool,
                handlers=[grpc.method_handlers_generic_handler(call_metadata.SERVICE, handlers)],
                interceptors=[grpc_transport.Guard(known, "fake")],
                options=grpc_transport.server_options(),
            )
            address = grpc_transport.bind(server, where, known)
            server.start()
            try:
                yield address
            finally:
                server.stop(None).wait()  # with 0 seconds of grace, a thread of gRPC's may outlive it

    def _fetch(self, requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for message in requests:
            for request_id, kind, _, _ in frames(message):
                if kind == FrameKind.FETCH:
                    yield from self.answer(request_id)


class FakeTrainer:
    """Calls a data host by hand, with grpcio.

    Args:
        address: The data host.
        metadata: What goes with every call; default: what a trainer sends.
    """

    def __init__(self, address: str, metadata: list[tuple[str, Any]] | None = None) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._metadata = call_metadata.metadata(credentials()) if metadata is None else metadata

    def __enter__(self) -> FakeTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, name: str, request: bytes = b"{}") -> bytes:
        """Make a call with one request and one answer."""
        return self._channel.unary_unary(call_metadata.method(name))(request, metadata=self._metadata, timeout=20)

    def wait_until_served(self) -> None:
        """Connect again until a call is answered; a server that has too many connections closes new ones."""
        call = self._channel.unary_unary(call_metadata.method("Status"))
        call(b"{}", metadata=self._metadata, timeout=60, wait_for_ready=True)

    def stream(self, name: str, *requests: bytes) -> list[bytes]:
        """Make a call with any number of requests, and wait for all answers."""
        return list(
            self._channel.stream_stream(call_metadata.method(name))(iter(requests), metadata=self._metadata, timeout=20)
        )

    def any_call(self, name: str, request: bytes = b"{}") -> grpc.StatusCode:
        """Make a call, and return how it ended."""
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
        return self._channel.stream_stream(call_metadata.method("Fetch"))(requests, metadata=self._metadata, timeout=60)
