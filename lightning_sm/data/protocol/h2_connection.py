"""A trainer's HTTP/2 connection to a data host, which receives messages straight into their receivers' memory.

h2 handles all HTTP/2 frames (RFC 9113; comments cite its sections) except DATA, which it would copy several times.
``recv_into`` reads the bodies of DATA frames instead. h2 sees only the first and last DATA frame of each stream,
without their bodies, to check that the stream is open.

Only the connection's thread uses the socket and h2. Other threads submit functions for it to call.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes, Settings

from lightning_sm.data.protocol.grpc_call import Call
from lightning_sm.data.protocol.grpc_status import CallError, CallStatus, response_error
from lightning_sm.data.protocol.wire import Wire

_HEAD = struct.Struct(">BHBBI")  # 4.1: 24-bit length, type, flags, stream
_UPDATE = struct.Struct(">BHBBII")  # 6.9: the same header, then the window increment
_DATA, _SETTINGS, _WINDOW_UPDATE = 0, 4, 8
_OF_BLOCKS = (1, 5, 9)  # HEADERS, PUSH_PROMISE, CONTINUATION: no other frame may come between these (6.10)
_END_STREAM, _END_HEADERS, _PADDED = 0x1, 0x4, 0x8
# Use the largest frames (4.2), so that each piece needs only one frame header, and the largest windows (6.9.1),
# because TCP already limits the sender: the receiver consumes all bytes before it reads more.
_MAX_FRAME_BYTES = (1 << 24) - 1
_WINDOW_BYTES, _DEFAULT_WINDOW_BYTES = (1 << 31) - 1, (1 << 16) - 1
_WINDOW_STEP_BYTES = 64 << 20
# Frames other than DATA are small. h2 keeps up to 64 frames of one header block (6.10).
_MAX_OTHER_BYTES = 64 << 10
# Stop reading while this much is unsent, so that a server that sends without reading cannot fill our memory.
_MAX_OUTBOX_BYTES = 4 << 20
# Send a PING (6.7) after this much silence; after as much again, the connection counts as lost.
_SILENT_S = 10.0


class _ClosedError(Exception):
    """The connection is no longer needed."""


class Http2Connection:
    """A connection and its thread.

    Args:
        address: ``host:port``.
        context: TLS settings; None for no TLS.
        call: The first call.

    Attributes:
        accepts_calls: Whether ``start`` may succeed.
        num_unreturned: Received bytes that have not been returned to the connection's window.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None, call: Call) -> None:
        self.accepts_calls = True
        self.num_unreturned = 0
        self._address = address
        self._lock = threading.Lock()
        self._functions: deque[Callable[[], None]] = deque()
        self._waiting = deque([call])
        call.transport = self
        self._calls: dict[int, Call] = {}
        self._wire = Wire(address, context)
        self._is_ready = False  # the server's settings have arrived
        self._is_in_block = False  # inside a header block
        self._is_pinged = False
        self._heard_at = time.monotonic()
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
                SettingCodes.MAX_FRAME_SIZE: _MAX_FRAME_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_OTHER_BYTES,
            },
        )
        self._thread = threading.Thread(target=self._run, name=f"connection {address}", daemon=True)
        self._thread.start()

    # From any thread

    def start(self, call: Call) -> bool:
        """Start a call as soon as the server allows one more; return False if the call needs another connection."""
        with self._lock:
            if not self.accepts_calls:
                return False
            call.transport = self
            self._waiting.append(call)
        self._submit(self._start_waiting)
        return True

    def send(self, call: Call, message: bytes) -> None:
        """Send a request of a call; it is dropped if the call has ended."""
        call.add_request(message)
        self._submit(partial(self._send_requests, call))

    def cancel(self, call: Call) -> None:
        """Cancel a call, unless it has ended."""
        self._submit(partial(self._cancel, call))

    def close(self) -> None:
        """End all calls and stop the thread."""
        self._submit(self._close)

    def _submit(self, function: Callable[[], None]) -> None:
        """Have the thread call a function."""
        self._functions.append(function)
        if threading.current_thread() is not self._thread:
            self._wire.wake()

    # In the connection's thread

    def _close(self) -> None:
        raise _ClosedError

    def _cancel(self, call: Call) -> None:
        if call.stream_id in self._calls or call in self._waiting:
            self._end(call, CallError(CallStatus.CANCELLED, "the trainer has cancelled the call"))

    def _run(self) -> None:
        error: Exception = CallError(CallStatus.CANCELLED, "the connection was closed")
        try:
            self._wire.connect()
            self._serve()
        except _ClosedError:
            pass
        except Exception as problem:  # noqa: BLE001  # the receivers of the calls report it
            error = CallError(CallStatus.UNAVAILABLE, f"{self._address}: {problem}")
            error.__cause__ = problem
        with self._lock:
            self.accepts_calls = False
        self._wire.close()
        for call in [*self._calls.values(), *self._waiting]:
            call.receiver.end(error)

    def _serve(self) -> None:
        self._h2.initiate_connection()  # 3.4
        self._h2.increment_flow_control_window(_WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
        self._flush()
        self._heard_at = time.monotonic()
        try:
            while True:
                self._receive_frame()
        except (_ClosedError, ProtocolError) as error:
            with contextlib.suppress(H2Error, OSError):
                self._h2.close_connection(getattr(error, "error_code", ErrorCodes.NO_ERROR))
                self._flush()
            raise

    # Receiving

    def _receive_frame(self) -> None:
        self._call_functions()
        while len(self._wire.outbox) >= _MAX_OUTBOX_BYTES:
            self._wait(0)
        head = bytearray(_HEAD.size)
        self._wire.fill(head, self._wait)
        self._heard_at, self._is_pinged = time.monotonic(), False
        high, low, kind, flags, stream_id = _HEAD.unpack(head)
        num_bytes, stream_id = high << 16 | low, stream_id & 0x7FFFFFFF
        if not self._is_ready and kind != _SETTINGS:  # 3.4
            raise ConnectionError("the server does not speak HTTP/2")
        if kind == _DATA and not self._is_in_block:
            self._receive_data(num_bytes, flags, stream_id)
        elif num_bytes > _MAX_OTHER_BYTES:
            raise ProtocolError(f"a frame of type {kind} has {num_bytes} bytes; {_MAX_OTHER_BYTES} are allowed")
        else:
            payload = bytearray(num_bytes)
            self._wire.fill(payload, self._wait)
            if kind in _OF_BLOCKS:
                self._is_in_block = not flags & _END_HEADERS
            self._handle(self._h2.receive_data(bytes(head + payload)))
        self._flush()

    def _receive_data(self, num_bytes: int, flags: int, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        if call is None or not call.has_received:
            self._handle(self._h2.receive_data(_HEAD.pack(0, 0, _DATA, 0, stream_id)))
        if flags & _PADDED:  # gRPC pads nothing
            raise ProtocolError("a DATA frame has padding")
        num_left = num_bytes
        while num_left:
            call = self._calls.get(stream_id)  # it may have ended while this thread waited
            if call is None:
                break
            call.has_received = True
            received = 0
            try:
                received = self._wire.receive_into(call.memory()[:num_left])
                if received:
                    call.advance(received)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001  # the receiver gets it back
                self._end(call, error)
            else:
                if not received:
                    self._wait(num_left)
            num_left -= received
        while num_left:  # discard the rest: the call has ended
            scratch = bytearray(min(num_left, _MAX_OTHER_BYTES))
            self._wire.fill(scratch, self._wait)
            num_left -= len(scratch)
        self._return_window(num_bytes, stream_id)
        if flags & _END_STREAM:
            self._handle(self._h2.receive_data(_HEAD.pack(0, 0, _DATA, _END_STREAM, stream_id)))

    def _return_window(self, num_bytes: int, stream_id: int) -> None:
        """Return bytes to the windows of the connection and the stream (6.9), in large steps."""
        for owner, number in ((self, 0), (self._calls.get(stream_id), stream_id)):
            if owner is not None:
                owner.num_unreturned += num_bytes
                if owner.num_unreturned >= _WINDOW_STEP_BYTES:
                    self._wire.outbox += _UPDATE.pack(0, 4, _WINDOW_UPDATE, 0, number, owner.num_unreturned)
                    owner.num_unreturned = 0

    def _wait(self, num_bytes: int) -> None:
        """Wait for some of ``num_bytes`` while sending; return at once if other threads have submitted functions."""
        if self._call_functions():
            return
        self._flush()
        timeout_s = self._heard_at + _SILENT_S - time.monotonic()
        # After a PING, wait for a single byte, which proves that the connection is not lost.
        if self._wire.wait(min(num_bytes, 1) if self._is_pinged else num_bytes, timeout_s):
            self._heard_at, self._is_pinged = time.monotonic(), False
        elif timeout_s <= 0:
            if self._is_pinged or not self._is_ready:
                raise TimeoutError(f"nothing was received for {_SILENT_S * (1 + self._is_pinged):.0f} s")
            self._heard_at = time.monotonic()
            if self._calls:
                self._h2.ping(bytes(8))
                self._is_pinged = True

    def _call_functions(self) -> bool:
        """Call the functions that other threads submitted, and return whether there were any."""
        are_any = bool(self._functions)
        while self._functions:
            self._functions.popleft()()
        return are_any

    # Sending

    def _flush(self) -> None:
        """Send as much as the socket accepts."""
        self._wire.outbox += self._h2.data_to_send()
        while self._wire.outbox and self._wire.flush():  # now there is room for more
            for call in list(self._calls.values()):
                self._send_requests(call)

    def _send_requests(self, call: Call) -> None:
        """Send a call's requests as far as the windows and the outbox have room (6.9.1)."""
        while call.stream_id in self._calls and not call.has_sent_all and len(self._wire.outbox) < _MAX_OUTBOX_BYTES:
            room = min(self._h2.local_flow_control_window(call.stream_id), self._h2.max_outbound_frame_size)
            part = call.take_outgoing(room)
            if part is None:
                self._h2.end_stream(call.stream_id)
            elif part:
                self._h2.send_data(call.stream_id, part)
            else:
                return
            self._wire.outbox += self._h2.data_to_send()

    def _start_waiting(self) -> None:
        """Start waiting calls, up to the server's limit of concurrent streams (5.1.2)."""
        limit = self._h2.remote_settings.max_concurrent_streams
        while self._is_ready and self._waiting and len(self._calls) < limit:
            call = self._waiting.popleft()
            call.stream_id = self._h2.get_next_available_stream_id()
            self._calls[call.stream_id] = call
            self._h2.send_headers(call.stream_id, call.headers)
            self._send_requests(call)

    # Events

    def _handle(self, received: list[events.Event]) -> None:
        for event in received:
            call = self._calls.get(getattr(event, "stream_id", None) or 0)
            match event:
                case events.RemoteSettingsChanged() | events.WindowUpdated():  # windows may have grown
                    self._is_ready = True
                    self._start_waiting()
                    for waiting in list(self._calls.values()):
                        self._send_requests(waiting)
                case events.ResponseReceived(headers=headers) if call is not None:
                    call.trailers = dict(headers)  # if the stream ends here, these are the trailers ("Trailers-Only")
                    error = response_error(call.trailers)
                    if error is None and event.stream_ended is None:
                        error = call.begin(call.trailers)
                    if error is not None:
                        self._end(call, error, is_open=event.stream_ended is None or not call.has_sent_all)
                    else:
                        self._send_requests(call)  # requests may have waited for the server's proof
                case events.TrailersReceived(headers=headers) if call is not None:
                    call.trailers = dict(headers)
                case events.StreamEnded() if call is not None:
                    self._end(call, call.outcome(), is_open=not call.has_sent_all)
                case events.StreamReset(error_code=code) if call is not None:
                    why = f"the stream was reset with HTTP/2 error code {code}"
                    self._end(call, CallError(CallStatus.UNAVAILABLE, why), is_open=False)
                case events.ConnectionTerminated(error_code=code):  # 6.8
                    raise ConnectionError(f"the server closes the connection with HTTP/2 error code {code}")

    def _end(self, call: Call, error: Exception | None, *, is_open: bool = True) -> None:
        """End a call, and reset its stream if it is still open, so that the server frees its resources (5.4.2)."""
        if self._calls.pop(call.stream_id, None) is None:
            self._waiting.remove(call)
        elif is_open:
            self._h2.reset_stream(call.stream_id, ErrorCodes.CANCEL)
        call.receiver.end(error)
        self._start_waiting()
