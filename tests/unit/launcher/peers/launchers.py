"""The launchers of one job: several in this process, or one in a process of its own that can be killed."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import queue
import socket
import subprocess
import sys
import threading
import time

from lightning_sm.job.stopping import Outcome
from lightning_sm.launcher.peers.connection import Timings, peers_key
from lightning_sm.launcher.peers.messages import PROTOCOL, PeerMessage, Proof, to_line
from lightning_sm.launcher.peers.peers import Peers
from tests.fakes.reserved_job import reserve_job

TIMEOUT_S = 20
MAIN, DATA = "algo-1", "data-1"
# Short, but long against the pauses of a busy machine.
FAST = {
    "peers_timeout_s": 0.5,
    "after_failure_s": 5.0,
    "heartbeat_s": 0.1,
    "silence_s": 5.0,
    "reconnect_s": 0.3,
    "hello_s": 2.0,
    "first_retry_s": 0.02,
    "longest_retry_s": 0.1,
    "tick_s": 0.02,
}
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

    def make(self, own, *, on_job_outcome=None, max_restarts=0, **timings):
        """The launcher of a host, not started; what it is told is in ``received`` and ``restarts``."""
        received, restarts = queue.Queue(), queue.Queue()
        peers = Peers(
            key=self.key,
            own=own,
            trainers=self.trainers,
            data_hosts=self.data_hosts,
            main_host=MAIN,
            addresses={MAIN: self.bind},
            port=self.port,
            bind=self.bind,
            on_job_outcome=on_job_outcome or received.put,
            on_restart=restarts.put,
            max_restarts=max_restarts,
            timings=Timings(**{**FAST, **timings}),
        )
        peers.received, peers.restarts = received, restarts
        return peers

    def start(self, own, **options):
        """The launcher of a host, started."""
        return self._exits.enter_context(self.make(own, **options))

    def start_all(self, **options):
        """The launchers of all hosts, the hub first."""
        return {host: self.start(host, **options) for host in (*self.trainers, *self.data_hosts)}

    def connect(self):
        """A connection to the hub that no launcher made."""
        return Raw(self._exits.enter_context(socket.create_connection((self.bind, self.port), timeout=TIMEOUT_S)))


class Raw:
    """One end of a connection between launchers, byte by byte; what was sent is in ``sent``."""

    def __init__(self, sock):
        self.sock = sock
        self.sent = b""
        self._received = b""

    def send(self, *messages):
        """Send messages, as objects or as bytes."""
        for message in messages:
            data = message if isinstance(message, bytes) else as_line(message)
            self.sent += data
            self.sock.sendall(data)

    def line(self):
        """The next line, empty after the last one."""
        while b"\n" not in self._received:
            data = self.sock.recv(1024)
            if not data:
                break
            self._received += data
        line, end, self._received = self._received.partition(b"\n")
        return line + end

    def introduce(self, host, key, protocol=PROTOCOL):
        """Say the first lines of a host, and return the hub's answer."""
        self.send({"protocol": protocol, "nonce": "of the host", "host": host})
        greetings = self.sent + self.line()
        self.send(Proof(mac(key, b"host", greetings)))
        answer = json.loads(self.line() or b"null")
        assert answer in (None, proof(""), proof(mac(key, b"hub", greetings)))
        return answer

    def is_closed(self):
        """Whether the other end closes the connection, whatever it sends before."""
        try:
            while self.sock.recv(1024):
                pass
        except ConnectionResetError:  # it closed with bytes unread
            pass
        except TimeoutError:
            return False
        return True


def welcome(connection, key):
    """Answer the first lines of a host as the hub of its job; returns this end of the connection."""
    hub = Raw(connection)
    greetings = hub.line()
    hub.send({"protocol": PROTOCOL, "nonce": "of the hub"})
    greetings += hub.sent
    assert json.loads(hub.line()) == proof(mac(key, b"host", greetings))
    hub.send(Proof(mac(key, b"hub", greetings)))
    return hub


def as_line(message):
    """A message, or any JSON, as it travels."""
    return to_line(message) if isinstance(message, PeerMessage) else json.dumps(message).encode() + b"\n"


def proof(mac):
    """The JSON of a proof."""
    return json.loads(to_line(Proof(mac)))


def mac(key, who, greetings):
    """What proves that a host, or the hub, has the key."""
    return hmac.new(key, who + b"\0" + greetings, hashlib.sha256).hexdigest()


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


def joined(lines, *hosts):
    """Wait until the hub has welcomed these hosts."""
    lines.wait_for(*(f"Host {host} joined." for host in hosts))


def outcomes_after_waiting(launchers):
    """What wait_for_peers returned on each host, all called at once."""
    results = {}

    def wait(host, peers):
        results[host] = peers.wait_for_peers()

    threads = [threading.Thread(target=wait, args=item, daemon=True) for item in launchers.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert set(results) == set(launchers), "wait_for_peers did not return"
    return results


_HOST_SCRIPT = """
import sys
from lightning_sm.launcher.peers.connection import Timings
from lightning_sm.launcher.peers.peers import Peers
own, key, bind, port, trainers, silence_s = sys.argv[1:7]
with Peers(key=bytes.fromhex(key), own=own, trainers=trainers.split(), data_hosts=[], main_host="algo-1",
           addresses={"algo-1": bind}, port=int(port), bind=bind, on_job_outcome=lambda job_outcome: None,
           timings=Timings(silence_s=float(silence_s), heartbeat_s=0.1, tick_s=0.02, first_retry_s=0.02,
                           longest_retry_s=0.1)):
    print("started", flush=True)
    sys.stdin.read()
"""


def host_process(exits, job, own, silence_s=30.0):
    """The launcher of a host in a process of its own, which runs until it is killed."""
    arguments = [own, job.key.hex(), job.bind, str(job.port), " ".join(job.trainers), str(silence_s)]
    command = [sys.executable, "-c", _HOST_SCRIPT, *arguments]
    process = exits.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    exits.callback(process.kill)
    assert process.stdout.readline() == b"started\n"
    return process
