"""Launchers of one job: several in this process, or one in a separate process that tests can kill."""

from __future__ import annotations

import logging
import queue
import socket
import subprocess
import sys
import time

from lightning_sm.job.outcomes import Outcome
from lightning_sm.launcher.peers.client import Client
from lightning_sm.launcher.peers.hub import Hub
from lightning_sm.launcher.peers.messages import Answer, Question, from_line, mac_of, peers_key, to_line
from lightning_sm.launcher.peers.outcome import Timings
from tests.fakes.reserved_job import reserve_job

TIMEOUT_S = 20
MAIN, DATA = "algo-1", "data-1"
# Short, but much longer than the pauses of a busy machine.
FAST = {"peers_timeout_s": 0.5, "after_failure_s": 5.0, "lost_s": 5.0, "poll_s": 0.02}
BROKEN = Outcome.of_exit_code(3, "ValueError: broken")


class Job:
    """The hosts of a job in one process: algo-1, algo-2, ... train; data-1, data-2, ... serve data."""

    identity = "arn:aws:sagemaker:us-east-1:123456789012:training-job/test"

    key = peers_key(identity, {})

    def __init__(self, exits, num_trainers=2, num_data_hosts=0):
        self.trainers = [f"algo-{number}" for number in range(1, num_trainers + 1)]
        self.data_hosts = [f"data-{number}" for number in range(1, num_data_hosts + 1)]
        self.bind = "127.0.0.2"
        self._exits = exits
        _, topology, ports = reserve_job({"trainer": self.trainers})
        exits.enter_context(ports)
        self.port = topology.main_port  # any unused port

    def make(self, own, *, max_restarts=0, **timings):
        """Make the launcher of a host without starting it."""
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
        """Start the launcher of a host."""
        return self._exits.enter_context(self.make(own, **options))

    def start_all(self, **options):
        """Start the launchers of all hosts, the hub first, and wait until they are connected."""
        launchers = {host: self.start(host, **options) for host in (*self.trainers, *self.data_hosts)}
        connected(*(peers for host, peers in launchers.items() if host != MAIN))
        return launchers

    def connect(self):
        """Open a raw connection to the hub."""
        return Raw(self._exits.enter_context(socket.create_connection((self.bind, self.port), timeout=TIMEOUT_S)))


class Raw:
    """A raw connection to a hub."""

    def __init__(self, sock):
        self.sock = sock
        self.lines = sock.makefile("rb")
        self.challenge = self.lines.readline()

    def ask(self, host, key, attempt=0, outcome=None):
        """Send a request as a host and return the answer."""
        line = self.request(host, key, attempt, outcome)
        self.sock.sendall(line)
        return from_line(self.lines.readline(), Answer, key, mac_of(line))

    def request(self, host, key, attempt=0, outcome=None):
        """The request line of a host."""
        return to_line(Question(host, "random", attempt, outcome), key, self.challenge)

    def is_closed(self):
        """True if the other end closes the connection without sending anything."""
        try:
            return self.lines.read() == b""
        except ConnectionResetError:  # the other end closed with unread bytes
            return True


def answered(connection, key, *answers):
    """Answer a host as its job's hub, once per answer, and return the requests."""
    challenge, lines, requests = b"random text of the hub\n", connection.makefile("rb"), []
    connection.sendall(challenge)
    for answer in answers:
        line = lines.readline()
        requests.append(from_line(line, Question, key, challenge))
        connection.sendall(to_line(answer, key, mac_of(line)))
    return requests


class Lines(logging.Handler):
    """A handler that collects log lines."""

    def __init__(self):
        super().__init__()
        self.queue = queue.Queue()
        self.seen = []

    def emit(self, record):
        """Keep a log line."""
        self.seen.append(record.getMessage())
        self.queue.put(self.seen[-1])

    def wait_for(self, *texts):
        """Wait until each text has appeared in a log line."""
        missing, seen, deadline = set(texts), [], time.monotonic() + TIMEOUT_S
        while missing:
            try:
                seen.append(self.queue.get(timeout=max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"{missing} not in {seen}") from None
            missing -= {text for text in missing if text in seen[-1]}


def until(condition):
    """Wait until a condition holds, and return the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < TIMEOUT_S, "it never came true"
        time.sleep(0.005)
    return time.monotonic() - started


def stays(condition, seconds):
    """True if a condition holds for this many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(0.005)
    return True


def connected(*clients):
    """Wait until the hub has answered these clients."""
    until(lambda: all(client.is_main_host_there for client in clients))


def outcome_of(peers):
    """Wait until a host knows the job's outcome, and return it."""
    until(lambda: peers.job_outcome is not None)
    return peers.job_outcome


def end_outcomes(*launchers):
    """Wait until all hosts may exit, and return the outcomes that they know."""
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
    """Start the launcher of a host in a process that runs until it is killed."""
    arguments = [own, job.key.hex(), job.bind, str(job.port), " ".join(job.trainers), str(lost_s)]
    command = [sys.executable, "-c", _HOST_SCRIPT, *arguments]
    process = exits.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    exits.callback(process.kill)
    assert process.stdout.readline() == b"started\n"
    return process
