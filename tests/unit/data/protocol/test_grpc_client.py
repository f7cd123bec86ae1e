"""Tests of the client against grpcio's server as data hosts run it: without TLS, with TLS and mutual TLS."""

from __future__ import annotations

import contextlib
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import trustme

from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.protocol.call_metadata import PROOF_KEY, metadata, method, proof
from lightning_sm.data.protocol.frames import FrameKind, FrameReader, frame
from lightning_sm.data.protocol.grpc_client import GrpcChannel
from lightning_sm.data.protocol.grpc_status import CallError, CallStatus
from lightning_sm.data.protocol.tls import certificate_hint
from lightning_sm.data.settings import Credentials

TIMEOUT_S = 60.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Credentials without TLS, with TLS and with mutual TLS, by name."""
    authority, folder = trustme.CA(), tmp_path_factory.mktemp("tls")
    issued = authority.issue_cert("127.0.0.1", "::1", "localhost")
    files = {"certificate": issued.cert_chain_pems, "key": [issued.private_key_pem], "authority": [authority.cert_pem]}
    for name, blobs in files.items():
        (folder / name).write_bytes(b"".join(blob.bytes() for blob in blobs))
    certificate, key, signer = (str(folder / name) for name in files)
    return {
        "without TLS": Credentials("job", "token"),
        "TLS": Credentials("job", "token", certificate, key),
        "mutual TLS": Credentials("job", "token", certificate, key, signer),
    }


@contextlib.contextmanager
def serving(credentials, where="127.0.0.1:0", **handlers):
    """Serve methods as a data host does, and yield the address."""
    made = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in handlers.items()}
    server = grpc_transport.make_server(made, credentials, "algo-9", 100, shares_port=False)
    address = grpc_transport.bind(server, where, credentials)
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def channel_to(address, credentials):
    """Yield a channel."""
    channel = GrpcChannel(address, credentials)
    try:
        yield channel
    finally:
        channel.close()


def echo(requests, context):
    """Answer each request with itself."""
    yield from requests


def fail(requests, context):
    """Fail after the first answer."""
    yield b"first"
    context.abort(grpc.StatusCode.NOT_FOUND, "kein Läufer \N{SNOWMAN} 100%")


class Messages:
    """The messages of an answer, joined."""

    def __init__(self):
        self.content, self.error, self.ended = b"", None, threading.Event()

    def begin(self, num_bytes):
        self._message = bytearray(num_bytes)
        self._rest = memoryview(self._message)
        self._keep()

    def memory(self):
        return self._rest

    def advance(self, num_bytes):
        self._rest = self._rest[num_bytes:]
        self._keep()

    def _keep(self):
        if not self._rest:
            self.content += self._message

    def end(self, error):
        self.error = error
        self.ended.set()


def stream(channel, name, requests):
    """Make a call with several answers, and return them joined."""
    answers = Messages()
    channel.open(name, answers, requests)
    assert answers.ended.wait(TIMEOUT_S)
    assert answers.error is None
    return answers.content


@pytest.mark.parametrize("how", ["without TLS", "TLS", "mutual TLS"])
@pytest.mark.parametrize("where", ["127.0.0.1:0", "[::1]:0"])
def test_messages_of_all_sizes_go_both_ways(tls, how, where):
    """Messages from 0 bytes to 20 MiB arrive unchanged in both directions."""
    known = tls[how]
    messages = [bytes([size % 251]) * size for size in (0, 1, 4095, 4096, 16_384, 300_000, 3 * MIB + 1, 20 * MIB)]
    with serving(known, where, List=echo) as bound, channel_to(bound, known) as channel:
        assert stream(channel, "List", messages) == b"".join(messages)
        for message in messages:
            assert channel.unary("List", message, TIMEOUT_S) == message


class Ring:
    """Two slots that receive the pieces of batches in turn; other frames are kept."""

    def __init__(self, num_bytes):
        self.slots = [bytearray(num_bytes), bytearray(num_bytes)]
        self.others = []
        self.num_pieces = 0
        self.is_wanted = True

    def place(self, request_id, kind, value, num_bytes):
        return Place(self, request_id, value, num_bytes) if self.is_wanted else None

    def take(self, request_id, kind, value, payload):
        self.others.append((request_id, kind, value, bytes(payload)))


class Place:
    """A place in a slot."""

    def __init__(self, ring, request_id, offset, num_bytes):
        self.ring = ring
        self.memory = memoryview(ring.slots[request_id % 2])[offset : offset + num_bytes]
        self.ends = []

    def end(self, is_complete):
        assert not self.ends
        self.ends.append(is_complete)
        self.ring.num_pieces += is_complete


class Frames(FrameReader):
    """A frame reader that signals the end of the call."""

    def __init__(self, owner):
        super().__init__(owner.take, owner.place)
        self.ended = threading.Event()

    def end(self, error):
        self.close()
        self.error = error
        self.ended.set()


@pytest.mark.parametrize("how", ["without TLS", "mutual TLS"])
def test_pieces_of_batches_go_to_their_memory(tls, how):
    """Pieces are written to their slots, whether or not they share a message; unwanted pieces are dropped."""
    contents = [bytes([number]) * (2 * MIB) for number in range(4)]

    def fetch(requests, context):
        for number, content in enumerate(contents):
            head = frame(number, FrameKind.HEADER, 5) + b"head%d" % number
            yield head + frame(number, FrameKind.DATA, MIB) + content[:MIB]
            yield frame(number, FrameKind.DATA, MIB, MIB) + content[MIB:] + frame(number, FrameKind.ENDED, value=7)

    known = tls[how]
    with serving(known, Fetch=fetch) as address, channel_to(address, known) as channel:
        for is_wanted in (True, False):
            ring = Ring(2 * MIB)
            ring.is_wanted = is_wanted
            frames = Frames(ring)
            channel.open("Fetch", frames, None)
            assert frames.ended.wait(TIMEOUT_S)
            assert frames.error is None
            assert ring.others == [
                one for n in range(4) for one in ((n, FrameKind.HEADER, 0, b"head%d" % n), (n, FrameKind.ENDED, 7, b""))
            ]
            assert ring.num_pieces == (8 if is_wanted else 0)
            assert ring.slots == (contents[2:] if is_wanted else [bytes(2 * MIB)] * 2)


def test_the_status_of_a_failed_call_arrives(tls):
    """The status and text of a failed call arrive, after a message or before any, and for an unknown method."""
    known = tls["without TLS"]
    with serving(known, List=fail) as address, channel_to(address, known) as channel:
        with pytest.raises(CallError) as caught:
            channel.stream_unary("List", [b""], TIMEOUT_S)
        assert caught.value.code is CallStatus.NOT_FOUND
        assert caught.value.details == "kein Läufer \N{SNOWMAN} 100%"
        with pytest.raises(CallError) as caught:
            channel.unary("Status", b"", TIMEOUT_S)
        assert caught.value.code is CallStatus.UNIMPLEMENTED
        with channel_to(address, Credentials("job", "wrong", None, None, None, "a test")) as stranger:
            with pytest.raises(CallError) as caught:
                stranger.unary("List", b"", TIMEOUT_S)
            assert caught.value.code is CallStatus.UNAUTHENTICATED
            assert "has its token from a test" in caught.value.details


def test_the_token_does_not_cross_the_network(tls, monkeypatch):
    """No call's headers contain the token, and no two calls have the same proof."""
    known, seen = Credentials("job", "geheim"), []
    headers = GrpcChannel._headers
    monkeypatch.setattr(GrpcChannel, "_headers", lambda *values: seen.append(headers(*values)) or seen[-1])
    with serving(known, List=echo, Fetch=echo) as address, channel_to(address, known) as channel:
        for name in ("List", "List", "Fetch"):
            assert channel.stream_unary(name, [b"x"], TIMEOUT_S) == b"x"
    assert len({dict(sent)[PROOF_KEY] for sent in seen}) == 3
    for secret in (b"geheim", b64encode(b"geheim").rstrip(b"=")):
        assert secret not in repr(seen).encode()


def recorded(address, name, *requests, metadata):
    """Replay a recorded call, and return its status."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(method(name))(iter(requests), metadata=metadata, timeout=TIMEOUT_S)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code()


@pytest.mark.parametrize("name", ["Load", "Fetch"])
def test_a_recorded_call_that_brings_pickles_cannot_be_repeated(tls, monkeypatch, name):
    """A recorded confirmation is refused, because the server's random number has changed; so is any other proof."""
    known, handled, nonce = tls["without TLS"], [], "of the trainer"

    def serve(requests, context):
        handled.extend(requests)
        yield b""

    monkeypatch.setattr(grpc_transport, "token_hex", lambda _: "of the server")
    sent = metadata(known, name, nonce)
    confirmation, own, trainers = (
        proof(known, *parts).encode()
        for parts in (
            ("confirmation", nonce, "of the server"),
            ("data host", nonce, "of the server"),
            ("trainer", method(name), nonce),
        )
    )
    with serving(known, **{name: serve}) as address:
        assert recorded(address, name, confirmation, b"pickle", metadata=sent) is grpc.StatusCode.OK
        assert handled == [b"pickle"]
        for first in (own, trainers, b""):
            status = recorded(address, name, first, b"pickle", metadata=sent)
            assert status is grpc.StatusCode.UNAUTHENTICATED
        assert recorded(address, name, metadata=sent) is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setattr(grpc_transport, "token_hex", lambda _: "another one")
        repeated = recorded(address, name, confirmation, b"pickle", metadata=sent)
        assert repeated is grpc.StatusCode.UNAUTHENTICATED
    assert handled == [b"pickle"]


def test_a_proof_is_that_of_one_side_and_one_method(tls):
    """A data host's proof, and a trainer's proof for another call, are refused."""
    known, nonce = tls["without TLS"], "of the trainer"
    version, number, right = metadata(known, "List", nonce)
    for wrong in (
        proof(known, "data host", method("List"), nonce),
        proof(known, "trainer", method("Status"), nonce),
        proof(known, "trainer", method("List"), "of another call"),
        proof(Credentials("job", "guessed"), "trainer", method("List"), nonce),
        "",
    ):
        with serving(known, List=echo) as address:
            status = recorded(address, "List", metadata=[version, number, (PROOF_KEY, wrong)])
            assert status is grpc.StatusCode.UNAUTHENTICATED
            assert recorded(address, "List", metadata=[version, number, right]) is grpc.StatusCode.OK


def test_as_many_calls_as_the_server_allows_share_a_connection(tls):
    """16 simultaneous calls share a connection."""
    known = tls["without TLS"]
    with serving(known, List=echo) as address, channel_to(address, known) as channel, ThreadPoolExecutor(16) as threads:
        requests = [b"%d" % number for number in range(16)]
        answers = list(threads.map(lambda request: channel.unary("List", request, TIMEOUT_S), requests))
    assert answers == requests


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_call_that_ends_here_ends_on_the_server(tls, how):
    """Cancelling a call or closing the channel frees the server's stream at once."""
    known = tls["without TLS"]
    started, ended = threading.Event(), threading.Event()

    def hang(requests, context):
        context.add_callback(ended.set)
        started.set()
        yield b""
        ended.wait(TIMEOUT_S)

    with serving(known, List=hang) as address, channel_to(address, known) as channel:
        if how == "deadline":
            with pytest.raises(CallError) as caught:
                channel.stream_unary("List", [b""], 3.0)  # long enough for the call to reach the server
            assert caught.value.code is CallStatus.DEADLINE_EXCEEDED
        else:
            frames = Frames(Ring(0))
            call = channel.open("List", frames, None)
            assert started.wait(TIMEOUT_S)
            call.cancel() if how == "cancel" else channel.close()
            assert frames.ended.wait(TIMEOUT_S)
            assert frames.error.code is CallStatus.CANCELLED
        assert ended.wait(TIMEOUT_S)


def test_a_server_that_stops_ends_its_calls_and_the_next_one_finds_another(tls):
    """When a server stops, its calls fail; the next call connects to the same address again."""
    known = tls["TLS"]
    started = threading.Event()

    def hang(requests, context):
        started.set()
        yield from requests

    frames = Frames(Ring(0))
    with serving(known, List=hang) as address:
        channel = GrpcChannel(address, known)
        channel.open("List", frames, None)
        assert started.wait(TIMEOUT_S)
    assert frames.ended.wait(TIMEOUT_S)
    assert frames.error.code in (CallStatus.UNAVAILABLE, CallStatus.CANCELLED)
    with serving(known, address, List=echo):
        assert channel.unary("List", b"again", TIMEOUT_S) == b"again"
    channel.close()


def test_a_certificate_that_is_not_right_is_named(tls, tmp_path):
    """The hint tells whether the name or the authority is wrong; if only one end uses TLS, there is no hint."""
    other = trustme.CA()
    issued = other.issue_cert("algo-7")
    paths = [tmp_path / "certificate", tmp_path / "key"]
    for path, blob in zip(paths, (issued.cert_chain_pems[0], issued.private_key_pem), strict=True):
        path.write_bytes(blob.bytes())
    named = Credentials("job", "token", *map(str, paths))
    plain, right = tls["without TLS"], tls["TLS"]
    for server, client, hint in (
        (named, named, "SubjectAlternativeName"),
        (named, right, "is not signed by"),
        (plain, right, ""),
        (right, plain, ""),
    ):
        with serving(server, List=echo) as address, channel_to(address, client) as channel:
            with pytest.raises(CallError) as caught:
                channel.unary("List", b"", TIMEOUT_S)
            assert caught.value.code is CallStatus.UNAVAILABLE
            found = certificate_hint(caught.value.__cause__)
            assert hint in found if hint else found == ""
