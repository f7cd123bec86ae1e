"""The launchers of one job: several in this process, or one in a process of its own that can be killed."""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import sys
import time

from lightning_sm.job.stopping import Outcome
from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.messages import Answer, Question, from_line, mac_of, peers_key, to_line
from lightning_sm.launcher.peers.outcome import Timings
from tests.fakes.reserved_job import reserve_job

TIMEOUT_S = 20
MAIN, DATA = "algo-1", "data-1"
# Short, but long against the pauses of a busy machine.
FAST = {"peers_timeout_s": 0.5, "after_failure_s": 5.0, "lost_s": 5.0, "poll_s": 0.02}
BROKEN = Outcome.of_exit_code(3, "ValueError: broken")


class Job:
    """The hosts of a job in one process: algo-1 and so on train, data-1 and so on serve."""

    identity = "arn:aws:sagemaker:us-east-1:123456789012:training-job/test"

    key = peers_key(identity, {})

    def __init__(self, exits, num_trainers=2, num_data_hosts=0):
        self.trainers = [f"algo-{number}" for number in range(1, num_trainers + 1)]
        self.data_hosts = [f"data-{number}" for number in range(1, num_data_hosts + 1)]
        self.bind = "127.0.0.2"
        self._exits = exits
        _, topology, ports = reserve_job({"trainer": self.trainers})
        exits.enter_context(ports)
        self.port = topology.main_port  # any port of its own

    def make(self, own, *, max_restarts=0, **timings):
        """The launcher of a host, not started."""
        limits, address = Timings(**{**FAST, **timings}), (self.bind, self.port)
        if own != MAIN:
            return Client(own, main_host=MAIN, address=address, key=self.key, timings=limits)
        if len(self.trainers) + len(self.data_hosts) == 1:
            address = None
        return Hub(
            own,
            self.trainers,
            self.data_hosts,
            address=address,
            key=self.key,
            timings=limits,
            max_restarts=max_restarts,
        )

    def start(self, own, **options):
        """The launcher of a host, started."""
        return self._exits.enter_context(self.make(own, **options))

    def start_all(self, **options):
        """The launchers of all hosts, the hub first, when all are connected."""
        launchers = {host: self.start(host, **options) for host in (*self.trainers, *self.data_hosts)}
        connected(*(peers for host, peers in launchers.items() if host != MAIN))
        return launchers

    def connect(self):
        """A connection to the hub that no launcher made."""
        return Raw(self._exits.enter_context(socket.create_connection((self.bind, self.port), timeout=TIMEOUT_S)))


class Raw:
    """One end of a connection to a hub, byte by byte."""

    def __init__(self, sock):
        self.sock = sock
        self.lines = sock.makefile("rb")
        self.challenge = self.lines.readline()

    def ask(self, host, key, attempt=0, outcome=None):
        """Ask as a host, and return the answer."""
        line = self.request(host, key, attempt, outcome)
        self.sock.sendall(line)
        return from_line(self.lines.readline(), Answer, key, mac_of(line))

    def request(self, host, key, attempt=0, outcome=None):
        """The line with which a host asks."""
        return to_line(Question(host, "random", attempt, outcome), key, self.challenge)

    def is_closed(self):
        """Whether the other end closes the connection, and sends nothing before."""
        try:
            return self.lines.read() == b""
        except ConnectionResetError:  # it closed with bytes unread
            return True


def answered(connection, key, *answers):
    """Answer a host as the hub of its job, once for each answer; returns its requests."""
    challenge, lines, requests = b"random text of the hub\n", connection.makefile("rb"), []
    connection.sendall(challenge)
    for answer in answers:
        line = lines.readline()
        requests.append(from_line(line, Question, key, challenge))
        connection.sendall(to_line(answer, key, mac_of(line)))
    return requests


class Lines(logging.Handler):
    """Log lines as they come."""

    def __init__(self):
        super().__init__()
        self.queue = queue.Queue()
        self.seen = []

    def emit(self, record):
        """Keep a line."""
        self.seen.append(record.getMessage())
        self.queue.put(self.seen[-1])

    def wait_for(self, *texts):
        """Wait until each text has been part of a line."""
        missing, seen, deadline = set(texts), [], time.monotonic() + TIMEOUT_S
        while missing:
            try:
                seen.append(self.queue.get(timeout=max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"{missing} not in {seen}") from None
            missing -= {text for text in missing if text in seen[-1]}


def until(condition):
    """Wait until something holds, and return how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < TIMEOUT_S, "it never came true"
        time.sleep(0.005)
    return time.monotonic() - started


def stays(condition, seconds):
    """Whether something holds for some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(0.005)
    return True


def connected(*clients):
    """Wait until the hub has answered these hosts."""
    until(lambda: all(client.is_main_host_there for client in clients))


def outcome_of(peers):
    """How the job ends, once a host knows it."""
    until(lambda: peers.job_outcome is not None)
    return peers.job_outcome


def end_outcomes(*launchers):
    """How the job ended for each host, once all may leave."""
    until(lambda: all(peers.is_done for peers in launchers))
    return {peers.job_outcome for peers in launchers}


_HOST_SCRIPT = """
import sys
from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.outcome import Timings
own, key, bind, port, trainers, lost_s = sys.argv[1:7]
trainers, address, timings = trainers.split(), (bind, int(port)), Timings(lost_s=float(lost_s), poll_s=0.02)
shared = {"address": address, "key": bytes.fromhex(key), "timings": timings}
with Hub(own, trainers, [], max_restarts=0, **shared) if own == "algo-1" else Client(
    own, main_host="algo-1", **shared
):
    print("started", flush=True)
    sys.stdin.read()
"""


def host_process(exits, job, own, lost_s=30.0):
    """The launcher of a host in a process of its own, which runs until it is killed."""
    arguments = [own, job.key.hex(), job.bind, str(job.port), " ".join(job.trainers), str(lost_s)]
    command = [sys.executable, "-c", _HOST_SCRIPT, *arguments]
    process = exits.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    exits.callback(process.kill)
    assert process.stdout.readline() == b"started\n"
    return process
