"""The star's end on all hosts but the main host: connects to the hub, reports to it and receives the job's outcome."""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import time

from lightning_sm.job.stopping import JobOutcome
from lightning_sm.launcher.peers.connection import Connection, Message, Report, Timings
from lightning_sm.launcher.peers.outcome import Restart

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
        restart: The last restart that was ordered; None if there was none.
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
        self.restart: Restart | None = None
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
        self._reported: tuple[Connection, Report] | None = None
        self._ended_at: float | None = None
        self._lost_at: float | None = None
        self._lost_why = ""
        self._was_welcomed = False
        self._is_job_over = False
        self._has_given_up = False
        self._has_logged_stranger = False
        self._unreached_at = now + timings.unreached_s
        self._why_unreached = "no answer yet"

    def is_done(self, now: float) -> bool:
        """Whether this host may end: the job is over, or the hub is lost or never appeared."""
        if self._is_job_over or self._has_given_up:
            return True
        if self._was_welcomed or self._ended_at is None:
            return False
        return now - self._ended_at >= self._timings.peers_timeout_s

    def tick(self, now: float, report: Report | None) -> None:
        """Do what is due.

        Args:
            now: The time.
            report: How the script of this host ended, once it has.
        """
        if report is None:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = now
        if self._connection is not None:
            try:
                self._maintain(self._connection, report, now)
            except OSError as error:
                self._drop(self._connection, str(error), now)
        elif not (self._is_job_over or self._has_given_up) and now >= self._retry_at:
            self._connect(now)
        self._give_up_lost_hub(now)
        self._say_if_unreached(now)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._selector.unregister(self._connection.sock)
            self._connection.sock.close()
            self._connection = None

    def _maintain(self, connection: Connection, report: Report | None, now: float) -> None:
        if connection.is_known and report is not None and self._reported != (connection, report):
            self._reported = connection, report
            connection.send(report.to_message())
        connection.heartbeat(now, self._timings, {"type": "heartbeat"})

    def _connect(self, now: float) -> None:
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, self._timings.longest_retry_s)
        try:
            # May block in the resolver. Without a connection, this thread has nothing else to do.
            address = socket.gethostbyname(self._address[0])
        except OSError as error:  # the host has no name yet
            self._why_unreached = error.strerror or str(error)
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection = Connection(sock, self._key, time.monotonic())
        try:
            sock.connect((address, self._address[1]))
        except BlockingIOError:
            pass
        except OSError as error:  # no route to it yet
            self._why_unreached = error.strerror or str(error)
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
            self._why_unreached = os.strerror(code)
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
        elif kind == "restart":
            self.restart = Restart.from_message(message)
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
            _LOG.info("No launcher of this job answers on %s (%s) yet: %s. Retrying.", *self._place, why)
        if not self._was_welcomed:
            self._why_unreached = why

    @property
    def _place(self) -> tuple[str, str]:
        return "{}:{}".format(*self._address), self._main_host

    def _say_if_unreached(self, now: float) -> None:
        if self._was_welcomed or now < self._unreached_at:
            return
        self._unreached_at = math.inf
        _LOG.warning(
            "No launcher of this job has answered on %s (%s) for %g s: %s. Until one does, this host does not learn of "
            "failures on other hosts, nor they of its own: when one fails, the others may hang until their collectives "
            "time out. The main host must run lightning-sm train, and let the hosts of the job connect to this port.",
            *self._place,
            self._timings.unreached_s,
            self._why_unreached,
        )

    def _give_up_lost_hub(self, now: float) -> None:
        if self._lost_at is None or self._is_job_over or self._has_given_up:
            return
        if now - self._lost_at >= self._timings.reconnect_s:
            self._has_given_up = True
            self.job_outcome = self.job_outcome or JobOutcome.lost(self._main_host, self._lost_why)
