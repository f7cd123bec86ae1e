"""A call's messages and outcome are correct, however the server's bytes arrive and whatever it sends."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PingReceived, RequestReceived, StreamReset, WindowUpdated
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lightning_sm.data.protocol import grpc_client, h2_connection
from lightning_sm.data.protocol.call_metadata import NONCE_KEY, PROOF_KEY, method, proof
from lightning_sm.data.protocol.grpc_client import GrpcChannel
from lightning_sm.data.protocol.grpc_status import CallError, CallStatus
from lightning_sm.data.settings import Credentials
from lightning_sm.errors import WireError
from tests.fakes.http2 import (
    ACK,
    CHALLENGE,
    CONTINUATION,
    CREDENTIALS,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    NONCE,
    OK_HEADERS,
    PADDED,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    TIMEOUT_S,
    UNPROVED_HEADERS,
    WINDOW_UPDATE,
    Http2Server,
    ScriptedWire,
    data,
    frame,
    header_block,
    headers,
    in_thread,
    message,
    settings,
    trailers,
)

SOON_S = 15.0
MIB = 1 << 20


class Receiver:
    """Keeps the messages of an answer, and the outcome of the call."""

    def __init__(self):
        self.messages = []
        self.error = None
        self.ended = threading.Event()
        self.begun = threading.Semaphore(0)

    def begin(self, num_bytes):
        self.messages.append(bytearray(num_bytes))
        self._rest = memoryview(self.messages[-1])
        self.begun.release()

    def memory(self):
        return self._rest

    def advance(self, num_bytes):
        self._rest = self._rest[num_bytes:]

    def end(self, error):
        self.error = error
        self.ended.set()

    def outcome(self):
        """Wait until the call has ended, and return its error."""
        assert self.ended.wait(SOON_S)
        return self.error


@pytest.fixture(autouse=True)
def _nonce(monkeypatch):
    """Fix the random number, so that the proofs in the answers' headers match."""
    monkeypatch.setattr(grpc_client, "token_hex", lambda _: NONCE)


@pytest.fixture
def server():
    """An HTTP/2 server."""
    with Http2Server() as made:
        yield made


@pytest.fixture
def channel(server):
    """A channel to the server."""
    made = GrpcChannel(server.address, CREDENTIALS)
    yield made
    made.close()


def start(channel, requests=(b"request",), name="List"):
    """Start a call, and return its receiver."""
    receiver = Receiver()
    receiver.call = channel.open(name, receiver, None if requests is None else iter(requests))
    return receiver


def answer(*messages, frame_bytes=1 << 14):
    """Return the frames of an answer."""
    content = b"".join(map(message, messages))
    bodies = [content[start : start + frame_bytes] for start in range(0, len(content), frame_bytes)]
    return b"".join([headers(), *map(data, bodies), trailers()])


# Bytes that arrive in parts


def receive(monkeypatch, parts):
    """Return the messages and the error of a call whose answer arrives in these parts."""
    with monkeypatch.context() as patch:
        ScriptedWire.install(patch, [settings(), *parts])
        receiver = start(GrpcChannel("nowhere:1", CREDENTIALS))
        error = receiver.outcome()
    return list(map(bytes, receiver.messages)), error


def by_h2(script):
    """Return the messages that h2 reads from an answer."""
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "x")])
    client.end_stream(1)
    content = b"".join(one.data for one in client.receive_data(settings() + script) if isinstance(one, DataReceived))
    messages = []
    while content:
        size = struct.unpack_from(">xI", content)[0]
        messages.append(content[5 : 5 + size])
        content = content[5 + size :]
    return messages


def by_grpcio(script):
    """Return the messages that grpcio reads from an answer."""
    with Http2Server() as server, grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(method("List"))(iter([b"request"]), timeout=TIMEOUT_S)
        with server.accept() as peer:
            assert peer.whole_request() == 1
            peer.send(script)
            return list(call)


MESSAGES = [b"", b"a", bytes(range(256)), b"", b"last"]


def test_an_answer_that_is_cut_at_any_byte_is_the_same(monkeypatch):
    """An answer is read correctly if it arrives in two parts, cut at any byte, or byte by byte."""
    script = answer(*MESSAGES, frame_bytes=100)
    assert by_h2(script) == by_grpcio(script) == MESSAGES
    for cut in range(1, len(script)):
        assert receive(monkeypatch, [script[:cut], script[cut:]]) == (MESSAGES, None), cut
    assert receive(monkeypatch, [script[at : at + 1] for at in range(len(script))]) == (MESSAGES, None)


def test_an_answer_that_ends_at_any_byte_is_an_error(monkeypatch):
    """If the connection is lost at any byte, the call fails with the cause, and the messages so far are intact."""
    script = answer(*MESSAGES, frame_bytes=100)
    for cut in range(len(script)):
        messages, error = receive(monkeypatch, [script[:cut]])
        assert (error.code, type(error.__cause__)) == (CallStatus.UNAVAILABLE, ConnectionResetError), cut
        assert messages[:-1] == MESSAGES[: len(messages)][:-1], cut


@st.composite
def answers(draw):
    """Valid frames of all sizes, mixed with frames of other types, and the parts in which they arrive."""
    messages = draw(st.lists(st.binary(max_size=60_000), max_size=5))
    content = b"".join(map(message, messages))
    others = [
        frame(PING, 0, 0, bytes(8)),
        frame(77, 5, 3, bytes(1000)),
        frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\7"),
        frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\7"),
        settings(s4=70_000),
        data(b""),
    ]
    frames = [headers()]
    while content:
        size = draw(st.integers(1, 16_000))
        frames.append(data(content[:size]))
        content = content[size:]
        frames += draw(st.lists(st.sampled_from(others), max_size=2))
    script = b"".join([*frames, trailers()])
    cuts = sorted(draw(st.lists(st.integers(0, len(script)), max_size=20)))
    parts = [script[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(script)], strict=True)]
    return messages, parts


@hypothesis_settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(answers())
def test_any_frames_in_any_parts_give_the_messages_that_h2_reads(monkeypatch, made):
    """Frame sizes, frames of other and unknown types, and the parts do not change the messages."""
    messages, parts = made
    assert receive(monkeypatch, parts) == (messages, None)
    assert by_h2(b"".join(parts)) == messages


@hypothesis_settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(answers())
def test_any_frames_give_the_messages_that_grpcio_reads(monkeypatch, made):
    """The messages are those that grpcio's client reads from the same bytes."""
    _, parts = made
    assert receive(monkeypatch, parts) == (by_grpcio(b"".join(parts)), None)


@pytest.mark.parametrize("frame_bytes", [1 << 14, (1 << 20) + 1, (1 << 24) - 1])
def test_frames_may_be_as_large_as_was_offered(server, channel, frame_bytes):
    """Frames of 16 KiB to 16 MiB are read from a real socket, with messages that end within a frame."""
    messages = [bytes([number]) * (3 * MIB + number) for number in range(8)]
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        sender = in_thread(lambda: peer.send(answer(*messages, frame_bytes=frame_bytes)))
        assert receiver.outcome() is None
        sender.join()
    assert receiver.messages == messages


# Outcomes of calls


@pytest.mark.parametrize(
    ("frames", "code", "text"),
    [
        (
            [headers(fields=[*OK_HEADERS, ("grpc-status", "5"), ("grpc-message", "no %C3%A9 %zz")], flags=1)],
            5,
            "no é %",
        ),
        ([headers(), trailers(fields=[("grpc-status", "16"), ("grpc-message", "")])], 16, ""),
        ([headers(), trailers(fields=[("grpc-status", "99")])], 2, "status b'99'"),
        ([headers(), trailers(fields=[("x", "y")])], 2, "status None"),
        ([headers(), data(message(b"x"), flags=END_STREAM)], 2, "status None"),
        ([headers(), data(message(b"x")[:-1]), trailers()], 13, "within a message"),
        ([headers(fields=[(":status", "503")])], 2, "HTTP status 503"),
        ([headers(fields=[(":status", "200"), ("content-type", "text/html")])], 2, "'text/html'"),
        ([headers(fields=[(":status", "404")], flags=END_STREAM)], 2, "HTTP status 404"),
        ([headers(), frame(RST_STREAM, 0, 1, b"\0\0\0\7")], 14, "code 7"),
        ([frame(RST_STREAM, 0, 1, b"\0\0\0\x08")], 14, "code 8"),
        ([headers(), data(b"\0"), frame(RST_STREAM, 0, 1, b"\0\0\0\2")], 14, "code 2"),
    ],
)
def test_the_end_of_a_call_has_a_status(server, channel, frames, code, text):
    """Trailers, trailers without headers, non-gRPC responses and resets end a call, but not the connection."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.send(headers(fields=[(":status", "103")]) if code == 16 else b"", *frames)
        error = receiver.outcome()
        assert (error.code, text in error.details) == (CallStatus(code), True), error
        second = start(channel)
        assert peer.whole_request() == 3
        peer.send(headers(3), data(message(b"next"), 3), trailers(3))
        assert second.outcome() is None
        assert second.messages == [b"next"]


def test_calls_share_a_connection_and_the_reset_of_one_leaves_the_others(server, channel):
    """Resetting one stream within a message does not disturb the calls that interleave with it."""
    receivers = [start(channel) for _ in range(3)]
    with server.accept() as peer:
        assert [peer.whole_request() for _ in receivers] == [1, 3, 5]
        first, last = message(b"x" * 50_000)[:20_000], message(b"x" * 50_000)[20_000:]
        peer.send(*(headers(stream) + data(first[:16_000], stream) for stream in (1, 3, 5)))
        peer.send(frame(RST_STREAM, 0, 3, b"\0\0\0\7"))
        assert receivers[1].outcome().code is CallStatus.UNAVAILABLE
        peer.send(*(data(first[16_000:] + last[:9_000], stream) for stream in (1, 3, 5)))  # stream 3's was on its way
        peer.send(*(data(last[9_000:25_000], stream) + data(last[25_000:], stream) for stream in (5, 1)))
        peer.send(trailers(5), trailers(1))
        assert [receivers[0].outcome(), receivers[2].outcome()] == [None, None]
    assert [receivers[0].messages, receivers[2].messages] == [[b"x" * 50_000]] * 2


def test_a_server_that_goes_away_ends_its_calls(server, channel):
    """When the server goes away, its calls fail, and the next call opens a new connection."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.send(headers(1), frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0) + b"soon"))
        error = receiver.outcome()
        assert (error.code, "closes the connection" in error.details) == (CallStatus.UNAVAILABLE, True)
        second = start(channel)
        with server.accept() as other:
            other.whole_request()
            other.send(answer(b"there"))
            assert second.outcome() is None


def test_a_deadline_frees_the_stream_of_the_server(server, channel):
    """At the deadline, which is also sent to the server, the client resets the stream."""
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(channel.unary, "Status", b"{}", 1.5)  # long enough to connect
        with server.accept() as peer:
            assert dict(peer.next(RequestReceived).headers)["grpc-timeout"] == "1500m"
            assert peer.next(StreamReset).error_code == 8
        error = call.exception()
    assert (error.code, str(error)) == (CallStatus.DEADLINE_EXCEEDED, "deadline exceeded (no answer within 1.5 s)")


def test_a_cancelled_call_frees_the_stream_of_the_server(server, channel):
    """A call cancelled within a message resets its stream; data on its way is dropped, and the connection survives."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        content = message(b"x" * 100_000)
        peer.send(headers(), data(content[:50_000][:16_000]))
        assert receiver.begun.acquire(timeout=SOON_S)
        receiver.call.cancel()
        assert receiver.outcome().code is CallStatus.CANCELLED
        assert peer.next(StreamReset).error_code == 8
        peer.send(data(content[16_000:32_000]), trailers())
        second = start(channel)
        assert peer.whole_request() == 3
        peer.send(headers(3), trailers(3))
        assert second.outcome() is None


def test_calls_wait_for_a_stream(server, channel):
    """If the server allows one stream at a time, each call waits until the previous one has ended."""
    receivers = [start(channel) for _ in range(3)]
    with server.accept(settings(s3=1)) as peer:
        for stream in (1, 3, 5):
            assert peer.whole_request() == stream
            peer.send(headers(stream), data(message(b"%d" % stream), stream), trailers(stream))
    assert [receiver.outcome() for receiver in receivers] == [None] * 3
    assert [receiver.messages for receiver in receivers] == [[b"1"], [b"3"], [b"5"]]


# Proofs


def proved(*parts, label="data host", of=CREDENTIALS):
    """Return headers with a proof."""
    return [*UNPROVED_HEADERS, (NONCE_KEY, CHALLENGE), (PROOF_KEY, proof(of, label, *parts))]


UNPROVED = {
    "none": UNPROVED_HEADERS,
    "of another token": proved(NONCE, CHALLENGE, of=Credentials("job", "guessed")),
    "of another call": proved("of another call", CHALLENGE),
    "over another number of its own": proved(NONCE, "of another server"),
    "over that of the trainer only": proved(NONCE),
    "that of the trainer": proved(method("List"), NONCE, label="trainer"),
    "a confirmation": proved(NONCE, CHALLENGE, label="confirmation"),
}


@pytest.mark.parametrize("what", UNPROVED)
def test_nothing_is_read_of_a_server_that_does_not_prove_the_token(server, channel, what):
    """The call fails for good at the headers, with advice: no message or status is read, and no memory allocated."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.send(headers(fields=UNPROVED[what]), data(message(b"pickle")), trailers())
        error = receiver.outcome()
        assert (error.code, error.is_final, receiver.messages) == (CallStatus.PERMISSION_DENIED, True, [])
        assert "did not prove that it has the token of this trainer, which belongs to job 'job'" in error.details
        second = start(channel)
        assert peer.whole_request() == 3
        peer.send(headers(3), trailers(3))
        assert second.outcome() is None


def test_a_success_without_a_proof_is_none(server, channel):
    """A status without a proof may report why a call failed, but never that it succeeded."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.send(headers(fields=[*UNPROVED_HEADERS, ("grpc-status", "0")], flags=END_STREAM))
        assert receiver.outcome().code is CallStatus.PERMISSION_DENIED


@pytest.mark.parametrize("name", ["Load", "Fetch"])
def test_pickles_wait_for_the_proof_of_the_server(server, channel, name):
    """No byte of a request is sent before the server's proof; the trainer's proof over both numbers goes first."""
    receiver = Receiver()
    call = channel.open(name, receiver, iter([b"pickle"]) if name == "Load" else None)
    call.send(b"later") if name == "Fetch" else None
    with server.accept() as peer:
        sent = dict(peer.next(RequestReceived).headers)
        assert sent[PROOF_KEY] == proof(CREDENTIALS, "trainer", method(name), NONCE)
        peer.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            peer.next(DataReceived)
        peer.sock.settimeout(TIMEOUT_S)
        peer.send(headers())
        first = message(proof(CREDENTIALS, "confirmation", NONCE, CHALLENGE).encode())
        expected, received = first + message(b"pickle" if name == "Load" else b"later"), b""
        while len(received) < len(expected):
            received += peer.next(DataReceived).data
        assert received == expected
        peer.send(trailers())
        assert receiver.outcome() is None


def test_pickles_are_not_sent_to_a_server_that_does_not_prove_the_token(server, channel):
    """Without the server's proof, the stream is reset with its requests unsent."""
    receiver = Receiver()
    channel.open("Load", receiver, iter([b"pickle"]))
    with server.accept() as peer:
        peer.next(RequestReceived)
        peer.send(headers(fields=UNPROVED_HEADERS))
        assert receiver.outcome().code is CallStatus.PERMISSION_DENIED
        kind, _, _ = peer.next_frame()
        while kind != RST_STREAM:
            assert kind != DATA
            kind, _, _ = peer.next_frame()


# Windows


def test_requests_wait_for_the_window_of_the_server(server, channel):
    """A window of 10 bytes lets 10 bytes through; a negative window, none."""
    request = bytes(range(200)) * 5
    receiver = start(channel, [request])
    with server.accept(settings(s4=10)) as peer:
        received = peer.next(DataReceived).data
        assert len(received) == 10
        peer.send(settings(s4=5), frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\4"))  # the window becomes -5, then -1
        peer.send(frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\3"))
        received += peer.next(DataReceived).data
        assert len(received) == 12
        peer.send(settings(s4=100_000))
        while len(received) < 5 + len(request):
            received += peer.next(DataReceived).data
        assert received == message(request)
        peer.send(answer(b"ok"))
        assert receiver.outcome() is None


def test_windows_are_given_back(server, channel):
    """The first update opens the connection's window to its limit; connection and stream get back every 64 MiB."""
    receiver = start(channel)
    with server.accept() as peer:
        assert peer.next(WindowUpdated).delta == (1 << 31) - 1 - 65535
        peer.whole_request()
        content = data(message(bytes(4 * MIB - 5)))
        sender = in_thread(lambda: peer.send(headers(), content * 17, trailers()))
        updates = []
        while len(updates) < 2:
            received = peer.next_frame()
            updates += [received] if received[0] == WINDOW_UPDATE else []
        sender.join()
        step = (64 * MIB).to_bytes(4, "big")
        assert updates == [(WINDOW_UPDATE, 0, step), (WINDOW_UPDATE, 1, step)]
        assert receiver.outcome() is None
    assert len(receiver.messages) == 17


def test_a_slow_receiver_holds_the_server_back(server, channel):
    """Data that a slow receiver has not read waits in the TCP buffers, and nothing is lost."""
    gate = threading.Event()

    class Slow(Receiver):
        def begin(self, num_bytes):
            super().begin(num_bytes)
            assert gate.wait(SOON_S)

    receiver = Slow()
    channel.open("List", receiver, iter([b"request"]))
    content = answer(*[bytes(MIB)] * 100, frame_bytes=MIB)
    with server.accept() as peer:
        peer.whole_request()
        peer.sock.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < len(content):
                sent += peer.sock.send(content[sent:])
        assert receiver.begun.acquire(timeout=SOON_S)
        assert sent < len(content)
        peer.sock.settimeout(TIMEOUT_S)
        gate.set()
        peer.send(content[sent:])
        assert receiver.outcome() is None
    assert receiver.messages == [bytes(MIB)] * 100


# Hostile servers


VIOLATIONS = {
    "not HTTP/2": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak HTTP/2"),
    "padding": (settings() + headers() + frame(DATA, PADDED, 1, b"\1ab\0"), "padding"),
    "data of no stream": (settings() + frame(DATA, 0, 0, b"x"), ""),
    "data of a stream that was never opened": (settings() + frame(DATA, 0, 9, b"x"), ""),
    "data before headers": (settings() + data(b"x"), ""),
    "data within headers": (settings() + frame(HEADERS, 0, 1, header_block(OK_HEADERS)) + data(b"x"), ""),
    "headers of a stream of the server": (settings() + headers(2), ""),
    "a promise": (settings() + frame(PUSH_PROMISE, 4, 1, b"\0\0\0\2" + header_block(OK_HEADERS)), ""),
    "settings of five bytes": (settings() + frame(SETTINGS, 0, 0, b"12345"), ""),
    "a window beyond the limit": (settings() + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ""),
    "a window that grows by nothing": (settings() + frame(WINDOW_UPDATE, 0, 0, bytes(4)), ""),
    "a short farewell": (settings() + frame(GOAWAY, 0, 0, b"1234"), ""),
    "a headers frame of 1 MiB": (settings() + frame(HEADERS, 4, 1, bytes(MIB)), "1048576 bytes; 65536 are allowed"),
    "garbage for headers": (settings() + frame(HEADERS, 4, 1, b"\xff" * 99), ""),
    "headers of 100 KB": (settings() + headers(fields=[*OK_HEADERS, ("x", "y" * 60_000), ("z", "y" * 5000)]), ""),
    "endless headers": (settings() + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(60_000)) * 100, ""),
    "an endless list of empty parts": (settings() + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 100, ""),
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_violation_of_http2_ends_the_connection(server, channel, what):
    """Calls fail with an error that names the violation, and the next call opens another connection."""
    script, text = VIOLATIONS[what]
    receiver = start(channel)
    with server.accept(b"") as peer:
        in_thread(lambda: peer.try_to_send(script))
        error = receiver.outcome()
    assert error.code is CallStatus.UNAVAILABLE
    assert text in error.details, error
    second = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.send(answer(b"right"))
        assert second.outcome() is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (message(b"x", is_compressed=1), "a compressed message arrived, but compression was not negotiated"),
        (struct.pack(">BI", 0, 2**32 - 1), "a message of 4294967295 bytes arrived; 70254592 are allowed"),
    ],
)
def test_a_message_that_breaks_the_rules_ends_the_call(server, channel, content, text):
    """A compressed or oversized message ends its call before any memory is allocated for it."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.send(headers(), data(content))
        error = receiver.outcome()
        assert (type(error), str(error)) == (WireError, text)
        assert peer.next(StreamReset).error_code == 8


def test_a_server_that_floods_without_reading_is_not_read(monkeypatch, server, channel):
    """Each PING requires an answer: the client stops reading at 4 MiB of waiting answers (64 KiB in this test)."""
    monkeypatch.setattr(h2_connection, "_MAX_OUTBOX_BYTES", 64 << 10)
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):
            peer.sock.sendall(frame(PING, 0, 0, bytes(8)) * 10_000_000)
    assert receiver.outcome().code is CallStatus.UNAVAILABLE


# Lost connections


def test_a_silent_connection_gets_a_ping_and_is_lost_without_an_answer(monkeypatch, server, channel):
    """A connection survives silence if it answers a PING, and is lost if it does not."""
    monkeypatch.setattr(h2_connection, "_SILENT_S", 1.5)  # long enough for the answer, even on a busy machine
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        peer.next(PingReceived)
        peer.send(frame(PING, ACK, 0, bytes(8)))
        peer.next(PingReceived)
        error = receiver.outcome()
        assert (error.code, type(error.__cause__)) == (CallStatus.UNAVAILABLE, TimeoutError)
        peer.read_to_end()


def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch, server, channel):
    """A connection is given up if the server does not send its settings first."""
    monkeypatch.setattr(h2_connection, "_SILENT_S", 0.3)
    receiver = start(channel)
    with server.accept(b""):
        assert isinstance(receiver.outcome().__cause__, TimeoutError)


def test_nobody_listens(channel, server):
    """If nobody listens, the error's cause is a ``ConnectionRefusedError``, and the next call tries again."""
    server.__exit__()
    for _ in range(2):
        assert isinstance(start(channel).outcome().__cause__, ConnectionRefusedError)


def test_a_closed_channel_ends_its_calls(server, channel):
    """Closing a channel cancels the calls in flight, refuses new ones, and closes the connection."""
    receiver = start(channel)
    with server.accept() as peer:
        peer.whole_request()
        channel.close()
        assert receiver.outcome().code is CallStatus.CANCELLED
        peer.read_to_end()
    with pytest.raises(CallError, match="the channel is closed"):
        start(channel)


@pytest.mark.parametrize("where", ["begin", "memory", "advance"])
def test_an_error_of_the_receiver_ends_its_call_only(server, channel, where):
    """An error raised by a receiver ends its call with that error; other calls continue."""

    class Broken(Receiver):
        pass

    def fail(*_):
        raise KeyError("mine")

    setattr(Broken, where, fail)
    receiver = Broken()
    channel.open("List", receiver, iter([b"request"]))
    with server.accept() as peer:
        peer.whole_request()
        peer.send(headers(), data(message(b"content")))
        assert type(receiver.outcome()) is KeyError
        peer.send(trailers())
        second = start(channel)
        assert peer.whole_request() == 3
        peer.send(headers(3), trailers(3))
        assert second.outcome() is None
