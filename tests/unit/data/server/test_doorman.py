"""Connections from strangers never reach gRPC; connections from trusted machines always do."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
import threading
import time

import grpc
import pytest

from lightning_sm.data.protocol import grpc_transport
from lightning_sm.data.protocol.probe import REFUSED, diagnose
from lightning_sm.data.server import doorman, peers
from lightning_sm.data.server.listener import Listener
from lightning_sm.data.settings import Credentials, HostSettings
from lightning_sm.errors import DataSettingsError

KNOWN = Credentials("job", "token")
STRANGER = "127.0.0.66"
# gRPC opens each connection with a SETTINGS frame.
HTTP2 = b"\0\0"


@contextlib.contextmanager
def listening(*trusted, address="127.0.0.1:0", look_up=None, credentials=KNOWN):
    """Listen as a data host does, and yield the address."""
    settings = HostSettings(address, 1, 1, None, None, "algo-3", credentials, trusted=list(trusted))
    handler = grpc.unary_unary_rpc_method_handler(lambda _, context: context.peer().encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peers, "_own_addresses", lambda: ["127.0.0.1", "::1"])
        if look_up is not None:
            patched.setattr(peers, "_look_up", look_up)
        listener = Listener({"Status": handler}, settings)
        try:
            yield listener.address
        finally:
            listener.stop(0)


def greeting(address, source=None):
    """Return the first bytes that a client reads."""
    host, _, port = address.rpartition(":")
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as sock:
        sock.settimeout(10)
        if source is not None:
            sock.bind((source, 0))
        sock.connect((host.strip("[]"), int(port)))
        with contextlib.suppress(ConnectionError):
            return sock.recv(100)
        return b""


def reaches_grpc(address, source):
    """Return whether a client gets through within 10 s: names are resolved while the first clients connect."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        if greeting(address, source).startswith(HTTP2):
            return True
    return False


def test_a_stranger_gets_a_line_and_the_log_names_it_once(caplog):
    """A stranger reads the refusal, and the log names it once; the data host's own machine is always admitted."""
    caplog.set_level(logging.WARNING)
    with listening() as address:
        assert greeting(address).startswith(HTTP2)
        for _ in range(3):
            assert greeting(address, STRANGER) == REFUSED
        assert greeting(address).startswith(HTTP2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"Refused a connection: data host algo-3 does not trust {STRANGER}. It trusts its own ")


@pytest.mark.parametrize("entry", [STRANGER, "127.0.0.64/30", "algo-1", "0.0.0.0/0"])
def test_what_the_user_trusts_is_let_in(entry):
    """The user can trust addresses, networks and names; the network of all addresses turns the filter off."""
    with listening(entry, look_up=lambda _: [STRANGER]) as address:
        assert reaches_grpc(address, STRANGER)


def test_a_host_whose_name_resolves_late_is_let_in_then():
    """Until the name resolves, connections are closed without the refusal, which would be final."""
    known = []

    def look_up(_):
        if not known:
            raise OSError
        return known

    with listening("algo-1", look_up=look_up) as address:
        assert greeting(address, STRANGER) == b""
        known.append(STRANGER)
        assert reaches_grpc(address, STRANGER)


# Many containers have no IPv6.
HOSTS = ["127.0.0.1", "0.0.0.0", "localhost", *(["[::1]", "[::]"] if doorman._has_ipv6() else [])]  # noqa: S104


@pytest.mark.parametrize("host", HOSTS)
def test_grpc_shares_the_port_on_every_kind_of_address(host):
    """Connections from trusted machines reach gRPC on IPv4, IPv6 and wildcard addresses."""
    with listening(address=f"{host}:0") as address:
        assert address.startswith(f"{host}:")
        port = address.rpartition(":")[2]
        ways = {"[::1]": ["[::1]"], "[::]": ["[::1]", "127.0.0.1"]}.get(host, ["127.0.0.1"])
        for way in ways * 20:
            assert greeting(f"{way}:{port}").startswith(HTTP2)
        if "127.0.0.1" in ways:
            assert greeting(f"127.0.0.1:{port}", STRANGER) == REFUSED


def test_a_port_that_is_taken_is_an_error():
    """Only the two sockets of one process share a port; a second data host fails."""
    expected = pytest.raises(DataSettingsError, match=r"cannot listen .* set data_service\.port")
    with listening() as address, expected, listening(address=address):
        pass


def test_a_port_can_be_used_again_at_once():
    """A restarted server process listens on the same port, even while old connections linger."""
    with listening() as address:
        assert greeting(address).startswith(HTTP2)
    with listening(address=address) as again:
        assert again == address
        assert greeting(address).startswith(HTTP2)
        assert greeting(address, STRANGER) == REFUSED


def test_with_mutual_tls_any_address_may_connect(tmp_path, monkeypatch):
    """With mutual TLS, the handshake checks the trainer's certificate instead of its address."""
    monkeypatch.setattr(grpc_transport, "bind", lambda *_: "127.0.0.1:1")
    mutual = Credentials("job", "token", *(str(tmp_path / name) for name in "abc"))
    settings = HostSettings("127.0.0.1:0", 1, 1, None, None, "algo-3", mutual)
    listener = Listener({}, settings)
    assert listener._doorman is None
    listener.stop(0)


def test_a_kernel_without_filters_leaves_the_port_open_and_says_so(monkeypatch, caplog):
    """If the kernel has no filter, the data host accepts all addresses, and logs what protects it."""
    monkeypatch.setattr(doorman, "_SO_ATTACH_REUSEPORT_CBPF", 9999)
    with listening() as address:
        assert greeting(address, STRANGER).startswith(HTTP2)
    assert "accepts connections from all addresses: the kernel rejected the filter" in caplog.text


def test_too_many_addresses_for_a_filter_leave_the_port_open_and_say_so(caplog):
    """A job with too many addresses for the filter locks out no host: the port stays open, with a warning."""
    many = [str(ipaddress.ip_address("10.0.0.0") + 2 * number) for number in range(5000)]
    with listening(*many) as address:
        assert reaches_grpc(address, STRANGER)
    assert "rejected the filter for the 5002 addresses that it trusts" in caplog.text


def run(code, packet):
    """Run a classic BPF program on a packet."""
    word, place = 0, 0
    while True:
        op, if_true, if_false, value = code[place]
        place += 1
        if op == 0x06:
            return value
        if op in (0x20, 0x30):
            start = value - 0xFFF00000
            word = packet[start] if op == 0x30 else struct.unpack_from(">I", packet, start)[0]
        elif op == 0x74:
            word >>= value
        elif op == 0x54:
            word &= value
        elif op == 0x05:
            place += value
        else:
            place += if_true if word == value else if_false


@pytest.mark.parametrize(
    "networks",
    [
        [],
        ["10.0.0.1"],
        ["10.0.0.1", "200.0.0.2", "10.0.0.1", "10.128.0.0/9"],
        ["0.0.0.0/0"],
        ["::/0"],
        ["fd00::1", "2001:db8::/33", "fd00::/128", "2001:db9::/32", "2001:dba::/32"],
        ["10.0.0.1", "fd00::1", "192.168.0.0/16", "172.16.0.0/12"],
        [str(ipaddress.ip_address("10.1.0.0") + number) for number in range(700)],
    ],
)
def test_the_filter_admits_exactly_the_networks(networks):
    """The filter agrees with ``ipaddress`` at the edges of every network, for IPv4 and IPv6."""
    parsed = [ipaddress.ip_network(each) for each in networks]
    code = doorman.program(parsed)
    edges = [edge for one in parsed for edge in (one.network_address, one.broadcast_address)]
    around = [type(edge)(int(edge) + step) for edge in edges for step in (-1, 0, 1) if 0 < int(edge) < 2**32 - 1]
    others = map(ipaddress.ip_address, ("127.0.0.1", "8.8.8.8", "255.255.255.255", "::", "::1", "fd00::2"))
    for address in {*edges, *around, *others}:
        head = bytes([0x45, *bytes(11)]) if address.version == 4 else bytes([0x60, *bytes(7)])
        wanted = any(address in network for network in parsed)
        assert run(code, head + address.packed + bytes(20)) == wanted, address


def test_a_refused_trainer_learns_its_address_and_the_setting():
    """The probe explains a refusal by the doorman, and reports nothing if the data host admits the trainer."""

    def refuse():
        with refusing.accept()[0] as connection:
            connection.sendall(REFUSED)

    with listening() as address:
        assert diagnose(address, KNOWN) == ""
    with socket.create_server(("127.0.0.1", 0)) as refusing:
        thread = threading.Thread(target=refuse)
        thread.start()
        text = diagnose(f"127.0.0.1:{refusing.getsockname()[1]}", KNOWN)
        thread.join()
    assert "does not trust the address of this trainer, 127.0.0.1, which is not one of the job's hosts" in text
    assert "add 127.0.0.1 to data_service.trust" in text
