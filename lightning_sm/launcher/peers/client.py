"""The star's end on all hosts but the main host: connects to the hub, reports to it and receives the job's outcome."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from dataclasses import asdict

from lightning_sm.job.stopping import JobOutcome, Outcome
from lightning_sm.launcher.peers.connection import Connection, Message, Timings

_LOG = logging.getLogger(__name__)


class Client:
    """Connects to the hub, again whenever the connection is lost. Driven by one thread.

    Args:
        selector: Where the connection is registered; the data of a key is called with the time.
        now: The time, in seconds of ``time.monotonic``.
        own: Name of this host.
        main_host: Name of the hub's host.
        address: Host name or IP address, and port, of the hub.
        key: The key of the job.
        timings: How long things may take.

    Attributes:
        job_outcome: How the job ends, once that is known.
        awaited: Hosts that must end before this one may.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        now: float,
        *,
        own: str,
        main_host: str,
        address: tuple[str, int],
        key: bytes,
        timings: Timings,
    ) -> None:
        self.job_outcome: JobOutcome | None = None
        self.awaited: list[str] = [main_host]
        self._selector = selector
        self._own = own
        self._main_host = main_host
        self._address = address
        self._key = key
        self._timings = timings
        self._connection: Connection | None = None
        self._retry_at = now
        self._retry_s = timings.first_retry_s
        self._reported_to: Connection | None = None
        self._ended_at: float | None = None
        self._lost_at: float | None = None
        self._lost_why = ""
        self._was_welcomed = False
        self._is_job_over = False
        self._has_given_up = False
        self._has_logged_stranger = False

    def is_done(self, now: float) -> bool:
        """Whether this host may end: the job is over, or the hub is lost or never appeared."""
        if self._is_job_over or self._has_given_up:
            return True
        if self._was_welcomed or self._ended_at is None:
            return False
        return now - self._ended_at >= self._timings.peers_timeout_s

    def tick(self, now: float, outcome: Outcome | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            outcome: How the script of this host ended, once it has.
        """
        if outcome is not None and self._ended_at is None:
            self._ended_at = now
        if self._connection is not None:
            try:
                self._maintain(self._connection, outcome, now)
            except OSError as error:
                self._drop(self._connection, str(error), now)
        elif not (self._is_job_over or self._has_given_up) and now >= self._retry_at:
            self._connect(now)
        self._give_up_lost_hub(now)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._selector.unregister(self._connection.sock)
            self._connection.sock.close()
            self._connection = None

    def _maintain(self, connection: Connection, outcome: Outcome | None, now: float) -> None:
        if connection.is_known and outcome is not None and self._reported_to is not connection:
            self._reported_to = connection
            connection.send({"type": "report", **asdict(outcome)})
        connection.heartbeat(now, self._timings, {"type": "heartbeat"})

    def _connect(self, now: float) -> None:
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._timings.longest_retry_s)
        try:
            # May block in the resolver. Without a connection, this thread has nothing else to do.
            address = socket.gethostbyname(self._address[0])
        except OSError:  # the host has no name yet
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection = Connection(sock, self._key, time.monotonic())
        try:
            sock.connect((address, self._address[1]))
        except BlockingIOError:
            pass
        except OSError:  # no route to it yet
            sock.close()
            return
        self._connection = connection
        self._selector.register(sock, selectors.EVENT_WRITE, self._introduce)

    def _introduce(self, now: float) -> None:
        connection = self._connection
        if connection is None:
            return
        code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self.close()  # the hub does not listen yet
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, self._read)
        try:
            connection.send({"type": "hello", "host": self._own})
        except OSError as error:
            self._drop(connection, str(error), now)

    def _read(self, now: float) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            for message in connection.receive(now):
                self._handle(connection, message)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._drop(connection, str(error) or type(error).__name__, now)

    def _handle(self, connection: Connection, message: Message) -> None:
        kind = message["type"]
        if not connection.is_known and kind != "welcome":
            raise ValueError("its first message was not a welcome")
        if kind == "welcome":
            connection.is_known = True
            self._was_welcomed = True
            self._lost_at = None
            self._retry_s = self._timings.first_retry_s
            _LOG.debug("Host %s was welcomed.", self._own)
        elif kind == "job_outcome":
            self.job_outcome = self.job_outcome or JobOutcome.from_message(message)
            if message["is_over"]:
                self._is_job_over = True
                connection.send({"type": "acknowledge"})
        elif kind == "heartbeat":
            self.awaited = [str(host) for host in message["awaited"]] or [self._main_host]
        else:
            raise ValueError(f"it sent a message of the unknown type {kind!r}")

    def _drop(self, connection: Connection, why: str, now: float) -> None:
        """Close the connection, and reconnect soon."""
        self.close()
        if connection.is_known:
            self._lost_at = now
            self._lost_why = why
            self._retry_at = now + self._timings.first_retry_s
            self.awaited = [self._main_host]
            if self.job_outcome is None:  # else it was to be expected, and the log has said why
                _LOG.info("Lost connection to the launcher on %s: %s. Reconnecting.", self._main_host, why)
        elif not self._has_logged_stranger:
            self._has_logged_stranger = True
            address = "{}:{}".format(*self._address)
            _LOG.info("No launcher of this job answers on %s (%s) yet: %s. Retrying.", address, self._main_host, why)

    def _give_up_lost_hub(self, now: float) -> None:
        if self._lost_at is None or self._is_job_over or self._has_given_up:
            return
        if now - self._lost_at >= self._timings.hub_reconnect_s:
            self._has_given_up = True
            self.job_outcome = self.job_outcome or JobOutcome.lost(self._main_host, self._lost_why)
