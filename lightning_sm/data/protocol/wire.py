"""A socket, with or without TLS, for one thread that receives into given memory and sends when there is room."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable

# Reads shorter than this go through a read-ahead buffer of this size; longer ones go straight to their target.
_READ_AHEAD_BYTES = 4 << 10
# Sleep until this much, or all that is missing, has arrived: a wake-up costs as much as reading 30 KB. But with TLS,
# wake up at the first byte: OpenSSL may already hold some of the missing bytes, and the thread would wait for more than
# the socket will receive.
_WAKEUP_BYTES = 256 << 10
_SEND_BYTES = 256 << 10
_CONNECT_TIMEOUT_S = 10.0
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Wire:
    """A connection to a server; call ``connect`` first.

    Args:
        address: ``host:port``.
        context: TLS settings; None for no TLS.

    Attributes:
        outbox: Bytes to be sent by ``flush``.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None) -> None:
        self.outbox = bytearray()
        self._address = address
        self._context = context
        self._poll = select.poll()
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._ahead = self._buffer[:0]  # bytes read ahead
        self._low_water = 1
        self._waking = threading.Lock()
        self._wakeup = os.eventfd(0)
        self._closing = contextlib.ExitStack()
        self._socket: socket.socket

    def connect(self) -> None:
        """Connect to the server.

        Raises:
            OSError: The server cannot be reached, or its certificate is not valid.
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
        """End the current or the next ``wait``; may be called from any thread."""
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
        """Copy the bytes that have arrived to the target, and return their number, which may be 0.

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
        """Read what has arrived; with TLS, read several times, because each call returns one record of up to 16 KiB."""
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
            target: Where the bytes go.
            wait: Waits until some of the given number of bytes have arrived.

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
        """Send as much of the outbox as the socket accepts now, and return whether the outbox is empty.

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
        """Wait until many or all of ``num_bytes`` have arrived, there is room to send, or ``wake`` is called.

        Args:
            num_bytes: Number of missing bytes; 0 to wait for none.
            timeout_s: Maximum wait in seconds.

        Returns:
            Whether bytes can be received, or the connection is lost, in which case ``receive_into`` raises.
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
