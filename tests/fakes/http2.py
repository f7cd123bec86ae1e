"""An HTTP/2 server that sends the frames a test chooses, and parses the client's frames with h2."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, StreamEnded
from hpack import Encoder

from lightning_sm.data.protocol import h2_connection
from lightning_sm.data.protocol.call_metadata import NONCE_KEY, PROOF_KEY, proof
from lightning_sm.data.protocol.wire import Wire
from lightning_sm.data.settings import Credentials
from tests.fakes.strangers import frame

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
TIMEOUT_S = 20.0

CREDENTIALS = Credentials("job", "token")
# The nonce of the trainer, to which the answers below reply, and the challenge of the server.
NONCE, CHALLENGE = "of the trainer", "of the server"

UNPROVED_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK_HEADERS = [*UNPROVED_HEADERS, (NONCE_KEY, CHALLENGE), (PROOF_KEY, proof(CREDENTIALS, "data host", NONCE, CHALLENGE))]
OK_TRAILERS = [("grpc-status", "0")]

_Event = TypeVar("_Event", bound=Event)


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return encoded headers that add nothing to the decoder's table."""
    return Encoder().encode([(name, value, True) for name, value in fields])


def headers(stream: int = 1, fields: Iterable[tuple[str, str]] = OK_HEADERS, flags: int = 0) -> bytes:
    """Return a HEADERS frame."""
    return frame(HEADERS, END_HEADERS | flags, stream, header_block(fields))


def trailers(stream: int = 1, fields: Iterable[tuple[str, str]] = OK_TRAILERS) -> bytes:
    """Return the frame that ends a stream."""
    return headers(stream, fields, END_STREAM)


def data(content: bytes, stream: int = 1, flags: int = 0) -> bytes:
    """Return a DATA frame."""
    return frame(DATA, flags, stream, content)


def message(content: bytes, is_compressed: int = 0) -> bytes:
    """Return a gRPC message with its prefix."""
    return struct.pack(">BI", is_compressed, len(content)) + content


def settings(**values: int) -> bytes:
    """Return a SETTINGS frame; arguments name settings by number, such as ``s4=10``."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", int(name[1:]), value) for name, value in values.items()))


class Http2Server:
    """A listening socket that accepts connections one by one."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Http2Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def accept(self, first: bytes = settings()) -> Http2Peer:
        """Accept a connection, and send the first bytes."""
        sock, _ = self._listener.accept()
        sock.settimeout(TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Http2Peer(sock)
        peer.send(first)
        return peer


class Http2Peer:
    """The server's end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._h2.initiate_connection()
        self._h2.data_to_send()  # discarded, because the test sends its own frames
        self._events: list[Event] = []

    def __enter__(self) -> Http2Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *frames: bytes) -> None:
        """Send bytes."""
        self.sock.sendall(b"".join(frames))

    def next(self, kind: type[_Event]) -> _Event:
        """Return the next event of a kind, discarding the events before it."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            received = self.sock.recv(1 << 16)
            if not received:
                raise EOFError(f"the client closed the connection before {kind.__name__}")
            self._events += self._h2.receive_data(received)

    def try_to_send(self, content: bytes) -> None:
        """Send bytes; ignore the error if the client closes the connection."""
        with contextlib.suppress(OSError):
            self.sock.sendall(content)

    def whole_request(self) -> int:
        """Wait until a call has sent all its requests, and return its stream id."""
        return self.next(StreamEnded).stream_id

    def next_frame(self) -> tuple[int, int, bytes]:
        """Read the next frame without h2, and return its type, stream id and payload."""
        head = self._exactly(9)
        return head[3], int.from_bytes(head[5:], "big"), self._exactly(int.from_bytes(head[:3], "big"))

    def _exactly(self, num_bytes: int) -> bytes:
        content = b""
        while len(content) < num_bytes:
            content += self.sock.recv(num_bytes - len(content))
        return content

    def read_to_end(self) -> None:
        """Read until the client closes the connection."""
        while self.sock.recv(1 << 16):
            pass


class ScriptedWire(Wire):
    """A wire on which bytes arrive in given parts, after which the connection is lost.

    Args:
        parts: The parts, in order.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        super().__init__("nowhere:1", None)
        self._parts = iter(parts)
        self._part = memoryview(b"")

    def connect(self) -> None:
        """Do nothing: there is no server."""

    def wake(self) -> None:
        """Do nothing: ``wait`` never blocks."""

    def receive_into(self, target: memoryview) -> int:
        """Receive the rest of the current part, or as much of it as fits."""
        received = min(len(target), len(self._part))
        target[:received] = self._part[:received]
        self._part = self._part[received:]
        return received

    def flush(self) -> bool:
        """Discard the outgoing bytes."""
        self.outbox.clear()
        return True

    def wait(self, num_bytes: int, timeout_s: float) -> bool:
        """Move on to the next part."""
        part = next(self._parts, None)
        if part is None:
            raise ConnectionResetError("the script has ended")
        self._part = memoryview(part)
        return True

    @classmethod
    def install(cls, monkeypatch: object, parts: Iterable[bytes]) -> None:
        """Make the next connection use a wire with these parts."""
        monkeypatch.setattr(h2_connection, "Wire", lambda *_: cls(parts))


def in_thread(function: Callable[[], object]) -> threading.Thread:
    """Start a function in a thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread
