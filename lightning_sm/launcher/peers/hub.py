"""The main host's end of the star: receives every launcher's report, decides the job's outcome, and sends it to all."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from lightning_sm.job.stopping import JobOutcome
from lightning_sm.launcher.peers.connection import Connection, Message, Report, Timings
from lightning_sm.launcher.peers.outcome import JobOutcomeTracker, Restart

_LOG = logging.getLogger(__name__)

# Connections that have not introduced themselves, besides one for each host: port scanners must not lock hosts out.
_MAX_STRANGERS = 64
# Of hosts in one message, which must fit into a line.
_MAX_NAMES = 20


class Hub:
    """The hub of a job, driven by one thread.

    Args:
        selector: Where connections are registered; the data of a key is called with the time.
        now: The time, in seconds of the clock that all times here come from.
        own: Name of this host.
        trainers: Names of all trainer hosts.
        data_hosts: Names of all data hosts.
        address: Where to listen; None if there is no other host.
        key: The key of the job.
        timings: How long things may take.
        max_restarts: How often the scripts of the trainer hosts may be started again.

    Attributes:
        awaited: Hosts that must end, or acknowledge the job's end, before this host may end.

    Raises:
        OSError: The hub cannot listen on the address.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        now: float,
        *,
        own: str,
        trainers: Sequence[str],
        data_hosts: Sequence[str],
        address: tuple[str, int] | None,
        key: bytes,
        timings: Timings,
        max_restarts: int,
    ) -> None:
        self.awaited: list[str] = []
        self._selector = selector
        self._own = own
        self._key = key
        self._timings = timings
        self._data_hosts = frozenset(data_hosts)
        self._tracker = JobOutcomeTracker(
            trainers,
            data_hosts,
            reconnect_s=timings.reconnect_s,
            absent_s=timings.peers_timeout_s,
            after_failure_s=timings.after_failure_s,
            max_restarts=max_restarts,
        )
        self._tracker.joined(own, now)
        self._max_connections = len(trainers) + len(data_hosts) + _MAX_STRANGERS
        self._connections: list[Connection] = []
        self._sent: Message | None = None
        self._sent_at = 0.0
        self._sent_restart: Message | None = None
        self._unacknowledged: set[str] = set()
        self._logged_strangers: set[str] = set()
        self._server = None if address is None else self._listen(address)

    @property
    def job_outcome(self) -> JobOutcome | None:
        """How the job ends, once that is known."""
        return self._tracker.job_outcome

    @property
    def restart(self) -> Restart | None:
        """The last restart that was ordered; None if there was none."""
        return self._tracker.restart

    def is_done(self, now: float) -> bool:
        """Whether this host may end: the job is over, and all connected launchers know it, or do not answer."""
        if not self._tracker.is_over:
            return False
        return not self._unacknowledged or now - self._sent_at >= self._timings.peers_timeout_s

    def tick(self, now: float, report: Report | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            report: How the script of this host ended, once it has.
        """
        if report is not None:
            self._tracker.reported(self._own, report.outcome, now, report.attempt)
        heartbeat = {"type": "heartbeat", "awaited": self._tracker.awaited[:_MAX_NAMES]}
        for connection in list(self._connections):
            self._attempt(connection, partial(connection.heartbeat, now, self._timings, heartbeat), now)
        self._tracker.update(now)
        self._send_restart_to_all(now)
        self._send_outcome_to_all(now)
        self.awaited = sorted(self._unacknowledged) if self._tracker.is_over else self._tracker.awaited

    def close(self) -> None:
        """Release the port and all connections."""
        for connection in self._connections:
            connection.finish()
        servers = () if self._server is None else (self._server,)
        for sock in (*servers, *(connection.sock for connection in self._connections)):
            self._selector.unregister(sock)
            sock.close()
        self._connections.clear()

    def _listen(self, address: tuple[str, int]) -> socket.socket:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen(self._max_connections)
        except OSError:
            server.close()
            raise
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, partial(self._accept, server))
        return server

    def _accept(self, server: socket.socket, now: float) -> None:
        for _ in range(_MAX_STRANGERS):
            try:
                sock, (address, _port) = server.accept()
            except OSError:  # none waits, or it has closed already
                return
            if len(self._connections) >= self._max_connections:
                strangers = [connection for connection in self._connections if not connection.is_known]
                self._drop(strangers[0], "too many connections have not introduced themselves", now)
            connection = Connection(sock, self._key, now)
            connection.host = address
            self._connections.append(connection)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: Connection, now: float) -> None:
        if connection in self._connections:  # else it was closed after the selector returned it
            self._attempt(connection, partial(self._receive, connection, now), now)

    def _attempt(self, connection: Connection, action: Callable[[], None], now: float) -> None:
        try:
            action()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._drop(connection, str(error) or type(error).__name__, now)

    def _receive(self, connection: Connection, now: float) -> None:
        for message in connection.receive(now):
            self._handle(connection, message, now)

    def _handle(self, connection: Connection, message: Message, now: float) -> None:
        kind = message["type"]
        if not connection.is_known:
            self._welcome(connection, message, now)
        elif kind == "report":
            self._note_report(connection.host, Report.from_message(message), now)
        elif kind == "acknowledge":
            self._unacknowledged.discard(connection.host)
        elif kind != "heartbeat":
            raise ValueError(f"it sent a message of the unknown type {kind!r}")

    def _welcome(self, connection: Connection, message: Message, now: float) -> None:
        host = message["host"]
        if message["type"] != "hello" or host == self._own or not self._tracker.has(host):
            raise ValueError(f"it introduced itself as {host!r}, which is not another host of this job")
        for other in list(self._connections):
            if other.is_known and other.host == host:
                self._forget(other)  # half open: a host reconnects only when its own end is closed
        connection.is_known = True
        connection.host = host
        self._tracker.joined(host, now)
        _LOG.debug("Host %s joined.", host)
        connection.send({"type": "welcome"})
        if self._sent_restart is not None:
            connection.send(self._sent_restart)
        if self._sent is not None:
            self._send_outcome(connection, self._sent)

    def _note_report(self, host: str, report: Report, now: float) -> None:
        outcome = report.outcome
        is_first_report = not self._tracker.has_ended(host)
        self._tracker.reported(host, outcome, now, report.attempt)
        if host in self._data_hosts and outcome.exit_code != 0 and is_first_report and self.job_outcome is None:
            _LOG.warning(
                "The script on data host %s failed with exit code %d. Training continues without it. Cause: %s",
                host,
                outcome.exit_code,
                outcome.headline,
            )

    def _send_restart_to_all(self, now: float) -> None:
        restart = self._tracker.restart
        message = None if restart is None else {"type": "restart", **asdict(restart)}
        if message is not None and message != self._sent_restart:
            self._sent_restart = message
            for connection in self._known():
                self._attempt(connection, partial(connection.send, message), now)

    def _known(self) -> list[Connection]:
        return [connection for connection in self._connections if connection.is_known]

    def _send_outcome_to_all(self, now: float) -> None:
        if self.job_outcome is None:
            return
        message = {"type": "job_outcome", **asdict(self.job_outcome), "is_over": self._tracker.is_over}
        if message != self._sent:
            self._sent = message
            self._sent_at = now
            for connection in self._known():
                self._attempt(connection, partial(self._send_outcome, connection, message), now)

    def _send_outcome(self, connection: Connection, message: Message) -> None:
        if message["is_over"]:
            self._unacknowledged.add(connection.host)
        connection.send(message)

    def _drop(self, connection: Connection, why: str, now: float) -> None:
        """Close a connection and note what that means for its host."""
        self._forget(connection)
        host = connection.host
        if connection.is_known:
            self._unacknowledged.discard(host)
            if host in self._data_hosts and not self._tracker.has_ended(host) and self.job_outcome is None:
                _LOG.warning("Lost connection to the launcher on data host %s: %s.", host, why)
            self._tracker.left(host, now, why)
        elif host not in self._logged_strangers and len(self._logged_strangers) < _MAX_STRANGERS:
            self._logged_strangers.add(host)
            _LOG.info("Closed a connection from %s: %s.", host, why)

    def _forget(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()
