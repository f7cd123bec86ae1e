"""Strangers without the token, from an address that a data host trusts and from one that it does not."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_sm.data.ipc.host_messages import NewWorker, Serve
from lightning_sm.data.ipc.processes import start_module
from lightning_sm.data.ipc.ring import Ring
from lightning_sm.data.protocol.probe import REFUSED
from lightning_sm.data.settings import HostSettings
from tests.fakes.strangers import FLOODS, connect, connect_silently
from tests.integration.data.fakes import FakeTrainer, credentials
from tests.integration.hosts import REPOSITORY
from tests.quick_processes import python_path

pytestmark = pytest.mark.processes

OWN, STRANGER = "127.0.0.1", "127.0.0.66"
TIMEOUT_S = 60.0
FLOOD_S = 4.0
# An attack that affects trainers delays them by 4 s or more, even on an idle machine.
LONG_S = 3.0
MIB = 1 << 20


class Server:
    """The server process of a data host whose main process is this test.

    Args:
        num_descriptors: Limit of open descriptors. Default: the limit of this process.
    """

    def __init__(self, num_descriptors=None):
        self.process, self.main = start_module("lightning_sm.data.server.process")
        if num_descriptors is not None:  # the server raises its soft limit when it starts to serve
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (num_descriptors // 2, num_descriptors))
        self.main.send(Serve(HostSettings("127.0.0.1:0", 2, MIB, None, None, "algo-9", credentials())))
        self.address = self.main.receive(TIMEOUT_S).address

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.main.close()
        self.process.wait(TIMEOUT_S)

    def memory(self):
        """Return the peak memory of the server in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))

    def num_descriptors(self):
        """Return the number of open descriptors of the server."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def add_worker(self, number):
        """Give the server a worker that never answers, and return the worker's end of the socket."""
        ring = Ring.create(2, MIB)
        ours, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), ring.fd)
            self.main.send(NewWorker(number, 0, "x", 2, ring.slot_bytes, fds))
        ring.close()
        return ours


def worst_answer_s(address, seconds):
    """Return how long the slowest answer to a new trainer took; every call must be answered."""
    with FakeTrainer(address) as trainer:
        return _worst_answer_s(trainer, seconds)


def _worst_answer_s(trainer, seconds):
    ends, worst = time.monotonic() + seconds, 0.0
    while (began := time.monotonic()) < ends:
        trainer.call("Status")
        worst = max(worst, time.monotonic() - began)
    return worst


@contextlib.contextmanager
def flood(how, address, source):
    """Attack the server from a separate process."""
    command = [sys.executable, "-m", "tests.fakes.strangers", how, address, source, "60"]
    env = {**os.environ, "PYTHONPATH": python_path(REPOSITORY)}
    with subprocess.Popen(command, env=env, cwd=REPOSITORY) as process:
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize("how", FLOODS)
def test_a_flood_from_an_address_that_is_not_trusted_does_not_reach_grpc(how):
    """Trainers are answered without delay, and the server's memory does not grow."""
    with Server() as server, flood(how, server.address, STRANGER):
        assert worst_answer_s(server.address, 1.0) < LONG_S
        before = server.memory()
        assert worst_answer_s(server.address, FLOOD_S) < LONG_S
        assert server.memory() - before < 8 * MIB


@pytest.mark.parametrize("how", ["opened and reset", "opened"])
def test_a_flood_of_calls_without_the_token_from_a_trusted_address_leaves_trainers_their_share(how):
    """Streams of one connection take turns: no trainer is refused or waits for seconds, and memory is bounded."""
    with Server() as server, flood(how, server.address, OWN):
        before = server.memory()
        assert worst_answer_s(server.address, FLOOD_S) < LONG_S
        assert server.memory() - before < 100 * MIB


def test_silent_connections_leave_descriptors_for_workers():
    """The server raises its limit; at 256 descriptors, 400 connections neither stop it nor make it spin."""
    with Server(num_descriptors=256) as server:
        made = connect_silently(server.address, OWN, 400)
        workers = [server.add_worker(number) for number in range(20)]
        try:
            # The server closes connections above its limit.
            refused = 0
            for sock in made:
                sock.settimeout(TIMEOUT_S)
                try:
                    refused += not sock.recv(1)
                except ConnectionError:
                    refused += 1
            assert 400 - refused <= 128
            assert 100 < server.num_descriptors() < 256
        finally:
            for sock in [*made, *workers]:
                sock.close()
        # The server may not have noticed yet that the connections are closed.
        with FakeTrainer(server.address) as trainer:
            trainer.wait_until_served()
            assert _worst_answer_s(trainer, 1.0) < LONG_S
        assert server.process.poll() is None


def test_a_worker_whose_descriptors_were_lost_exits():
    """Without a free descriptor, the server closes the worker's connection and survives."""
    with Server(num_descriptors=256) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (server.num_descriptors() + 1, 256))
        with server.add_worker(7) as worker:
            worker.settimeout(TIMEOUT_S)
            assert not worker.recv(1)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        with server.add_worker(8):
            assert worst_answer_s(server.address, 0.5) < LONG_S


def test_a_refused_address_is_told_so():
    """The server refuses the connection before it reads any byte."""
    with Server() as server, connect(server.address, STRANGER) as sock:
        assert sock.recv(100) == REFUSED
