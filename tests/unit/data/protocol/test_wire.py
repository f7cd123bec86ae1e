"""Tests of a connection's socket, with TLS."""

import socket
import ssl
import threading
import time

import pytest
import trustme

from lightning_sm.data.protocol.wire import Wire

SOON_S = 60.0
NUM_BYTES = 100_000


@pytest.fixture
def connected():
    """A ``Wire`` connected with TLS, and the other end's socket, TLS object and outgoing buffer."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(trusting)
    trusting.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wire = Wire(f"127.0.0.1:{listener.getsockname()[1]}", trusting)
        thread = threading.Thread(target=wire.connect)
        thread.start()
        end, _ = listener.accept()
    with end:
        end.settimeout(SOON_S)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                end.sendall(outgoing.read())
                incoming.write(end.recv(1 << 16))
        end.sendall(outgoing.read())
        thread.join()
        yield wire, end, tls, outgoing
        wire.close()


def receive(wire, target):
    """Receive everything that has arrived, and return the rest of the target."""
    while target and (received := wire.receive_into(target)):
        target = target[received:]
    return target


def test_the_rest_of_a_record_wakes_the_reader(connected):
    """The rest of a record wakes the reader, although OpenSSL already holds a part of the missing bytes."""
    wire, end, tls, outgoing = connected
    content = bytes(range(250)) * (NUM_BYTES // 250)
    assert tls.write(content) == NUM_BYTES
    encrypted = outgoing.read()
    target = memoryview(bytearray(NUM_BYTES))
    half = len(encrypted) // 2 + 5_000
    end.sendall(encrypted[:half])
    rest, deadline = target, time.monotonic() + SOON_S
    while len(rest) > NUM_BYTES - half + 17_000 and time.monotonic() < deadline:  # all whole records of the first half
        assert wire.wait(1, SOON_S)
        rest = receive(wire, rest)
    assert 17_000 < len(rest) < NUM_BYTES
    while wire.wait(1, 0.0):  # the part of the next record that has arrived
        rest = receive(wire, rest)
    end.sendall(encrypted[half:])
    while rest:
        assert wire.wait(len(rest), SOON_S)
        rest = receive(wire, rest)
    assert target == content


def test_the_end_of_a_connection_is_an_error(connected):
    """Data that arrived before the end of the connection is received; reading beyond it is an error."""
    wire, end, tls, outgoing = connected
    tls.write(b"last")
    end.sendall(outgoing.read())
    end.shutdown(socket.SHUT_WR)
    target = bytearray(4)
    wire.fill(target, lambda num_bytes: wire.wait(num_bytes, SOON_S))
    assert target == b"last"
    with pytest.raises(OSError, match=r"the server closed the connection"):
        wire.fill(bytearray(1), lambda num_bytes: wire.wait(num_bytes, SOON_S))
