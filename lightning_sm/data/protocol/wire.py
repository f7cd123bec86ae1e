"""A socket, with TLS or without, for one thread that receives into memory of others, and sends when there is room."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable

# Short parts are read ahead, with up to so many bytes of what follows; longer parts go straight to their memory.
_READ_AHEAD_BYTES = 4 << 10
# The thread sleeps until this much has arrived, or what is missing: a wake-up costs as much as reading 30 KB. Not with
# TLS: OpenSSL may have a part of what is missing, so that no more arrives than the rest.
_WAKEUP_BYTES = 256 << 10
_SEND_BYTES = 256 << 10
_CONNECT_TIMEOUT_S = 10.0
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Wire:
    """A connection to a server, which ``connect`` makes.

    Args:
        address: ``host:port``.
        context: TLS; None: without.

    Attributes:
        outbox: Bytes that ``flush`` sends.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None) -> None:
        self.outbox = bytearray()
        self._address = address
        self._context = context
        self._poll = select.poll()
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]  # bytes that were read ahead
        self._low_water = 1
        self._waking = threading.Lock()
        self._wakeup = os.eventfd(0)
        self._closing = contextlib.ExitStack()
        self._socket: socket.socket

    def connect(self) -> None:
        """Connect.

        Raises:
            OSError: The server cannot be reached, or its certificate is not right.
        """
        name, _, port = self._address.rpartition(":")
        host = name.strip("[]")
        sock = self._closing.enter_context(socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            secured = self._closing.enter_context(self._context.wrap_socket(sock, server_hostname=host))
            if secured.selected_alpn_protocol() != "h2":  # RFC 9113, 3.2
                raise ConnectionError("the server does not offer HTTP/2 in the TLS handshake (ALPN)")
            sock = secured
        self._socket = sock
        sock.setblocking(False)
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)

    def wake(self) -> None:
        """End a ``wait`` of the thread; from any thread."""
        with self._waking:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Close the connection, if there is one."""
        with self._waking:
            os.close(self._wakeup)
            self._wakeup = -1
        self._closing.close()

    def receive_into(self, target: memoryview) -> int:
        """Fill the target as far as bytes have arrived, and return how many; 0: none have.

        Raises:
            OSError: The connection is lost.
        """
        if not self._ahead:
            is_direct = len(target) >= _READ_AHEAD_BYTES
            received = self._read(target if is_direct else self._buffer)
            if is_direct or not received:
                return received
            self._ahead = self._buffer[:received]
        received = min(len(target), len(self._ahead))
        target[:received] = self._ahead[:received]
        self._ahead = self._ahead[received:]
        return received

    def _read(self, target: memoryview) -> int:
        """Read from the socket: all that has arrived, which TLS returns in records of 16 KiB."""
        total = 0
        try:
            while total < len(target):
                received = self._socket.recv_into(target[total:])
                if not received and not total:
                    raise ConnectionResetError("the server closed the connection")
                total += received
                if self._context is None or not received:
                    break
        except _NOT_NOW:
            pass
        return total

    def fill(self, target: bytearray, wait: Callable[[int], None]) -> None:
        """Fill the whole target.

        Args:
            target: Where bytes go.
            wait: Waits until some of so many bytes have arrived.

        Raises:
            OSError: The connection is lost.
        """
        view = memoryview(target)
        while view:
            received = self.receive_into(view)
            view = view[received:]
            if not received:
                wait(len(view))

    def flush(self) -> bool:
        """Send of the outbox what the socket takes now; return whether it is empty.

        Raises:
            OSError: The connection is lost.
        """
        while self.outbox:
            with memoryview(self.outbox) as content, content[:_SEND_BYTES] as part:
                try:
                    num_sent = self._socket.send(part)
                except _NOT_NOW:
                    return False
            del self.outbox[:num_sent]
        return True

    def wait(self, num_bytes: int, timeout_s: float) -> bool:
        """Wait until so many bytes have arrived, or many of them; or until there is room to send, or ``wake``.

        Args:
            num_bytes: Bytes that are missing; 0: do not wait for any.
            timeout_s: Seconds to wait at most.

        Returns:
            Whether there is something to receive, or the connection is lost, which ``receive_into`` raises.
        """
        low_water = max(1, min(num_bytes, _WAKEUP_BYTES)) if self._context is None else 1
        if low_water != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        events = select.POLLIN if num_bytes else 0
        self._poll.modify(self._socket, events | select.POLLOUT if self.outbox else events)
        ready = dict(self._poll.poll(max(0.0, 1000 * timeout_s)))
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        return bool(ready.get(self._socket.fileno(), 0) & ~select.POLLOUT)
